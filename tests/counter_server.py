"""A Model Context Protocol server with state: `python counter_server.py`, or with "http" on a port that it prints."""

import os
import sys
import time

try:
    from mcp.server import MCPServer as Server
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as Server

server, seen = Server("counter"), []


@server.tool()
def count(by: int = 1) -> str:
    """Adds to a number that the server keeps."""
    seen.append(by)
    return f"{sum(seen)} of {os.getpid()}"


@server.tool()
def refuse() -> str:
    """Cannot be done."""
    raise ValueError("not today")


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        import socket

        import uvicorn

        with socket.create_server(("127.0.0.1", 0)) as sock:
            print(sock.getsockname()[1], flush=True)
            uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).run(sockets=[sock])
    else:
        server.run()
