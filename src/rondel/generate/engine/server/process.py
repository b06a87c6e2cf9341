"""The server as a process: say where, serve, and on SIGTERM end what has begun before leaving."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from rondel.generate.engine.server.app import build_app
from rondel.generate.engine.server.service import GenerationService
from rondel.system.http import PatientConnection, QuietServer
from rondel.system.signals import handled_signals

LAST = 5  # seconds for answers to leave after the drain's limit has cut them


async def run(service: GenerationService, sock: socket.socket, *, drain: float, ready: Callable[[], None]) -> None:
    """Serve until it is asked to end; then nothing new, `drain` seconds for what runs,
    and partial answers for what is left.
    """
    config = uvicorn.Config(
        build_app(service),
        http=PatientConnection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(drain) + LAST,
    )
    server, loop = QuietServer(config, ready), asyncio.get_running_loop()
    cut: set[asyncio.Task[int]] = set()

    def request_stop() -> None:
        if server.should_exit:
            server.force_exit = True  # asked twice
            return
        service.draining = server.should_exit = True
        loop.call_later(drain, lambda: cut.add(asyncio.ensure_future(service.engine.abort(lambda _: True))))

    for number in handled_signals():
        loop.add_signal_handler(number, request_stop)
    try:
        await server.serve([sock])
    finally:
        await service.engine.pause("abort")
        service.close()
