"""The training API as a process: serve until it is told to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from rondel.system.http.server import HttpServer
from rondel.system.signals import handled_signals
from rondel.training_api.app import TrainingApp

LAST = 5  # seconds for answers to leave


async def serve_app(app: TrainingApp, sock: socket.socket, *, ready: Callable[[], None]) -> None:
    """What is asked and not answered yet is dropped at the end: its clients ask the next server again, by their state."""
    server = HttpServer(app, sock, drain=LAST, ready=ready)
    for number in handled_signals():
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    try:
        await server.serve()
    finally:
        await app.clients.close()
