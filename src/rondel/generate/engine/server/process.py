"""The server as a process: say where, serve, and on SIGTERM end what has begun before leaving."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from rondel.generate.engine.server.app import ServerAuth
from rondel.generate.engine.server.engine_service import EngineService
from rondel.system.http.server import HttpServer
from rondel.system.signals import handled_signals

LAST = 5  # seconds for answers to leave after the drain's limit has cut them


async def run(
    service: EngineService, app: ServerAuth, sock: socket.socket, *, drain: float, ready: Callable[[], None]
) -> None:
    """Serve until it is asked to end; then nothing new, `drain` seconds for what runs,
    and partial answers for what is left.
    """
    server = HttpServer(app, sock, drain=int(drain) + LAST, ready=ready)
    loop = asyncio.get_running_loop()
    cut: set[asyncio.Task[int]] = set()

    def request_stop() -> None:
        server.stop()
        if service.draining:
            return  # asked twice
        service.draining = True
        loop.call_later(drain, lambda: cut.add(asyncio.ensure_future(service.engine.abort(lambda _: True))))

    for number in handled_signals():
        loop.add_signal_handler(number, request_stop)
    try:
        await server.serve()
    finally:
        await service.engine.pause("abort")
        service.close()
