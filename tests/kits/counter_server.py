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
    raise ValueError(
        f"not today\nTraceback (most recent call last):\n  File {__file__!r}, line 1, in refuse\n{__file__}"
    )


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "done"


@server.tool()
def look(spoiled: bool = False) -> list:
    """Shows a picture."""
    from mcp.types import ImageContent, TextContent

    data = png(56, 84, (255, 0, 0), spoiled)
    return [TextContent(type="text", text="here"), ImageContent(type="image", data=data, mimeType="image/png")]


def png(width, height, colour, spoiled):
    import base64
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + bytes(colour) * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", rows[:20] if spoiled else rows)
        + chunk(b"IEND", b"")
    )
    return base64.b64encode(whole).decode()


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        import socket

        import uvicorn

        with socket.create_server(("127.0.0.1", 0)) as sock:
            print(sock.getsockname()[1], flush=True)
            uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).run(sockets=[sock])
    else:
        server.run()
