"""HTTP for every server and client of Rondel: `server` listens, `request` reads, `response` refuses, `client` asks."""
