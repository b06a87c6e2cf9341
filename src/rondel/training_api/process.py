"""The training API as a process: serve until it is told to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette

from rondel.system.http.server import HttpServer
from rondel.system.signals import handled_signals

LAST = 5  # seconds for answers to leave


async def serve_app(
    app: Starlette, sock: socket.socket, *, ready: Callable[[], None], close: Callable[[], Awaitable[None]]
) -> None:
    """Until it is told to end; then `close`. What is asked and not answered yet is dropped: its clients ask the next
    server again, by their state.
    """
    server = HttpServer(app, sock, drain=LAST, ready=ready)
    for number in handled_signals():
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    try:
        await server.serve()
    finally:
        await close()
