"""The server as a process: bind, say where, serve, and on SIGTERM end what has begun before leaving."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from rondel.generate.engine.server.app import build
from rondel.generate.engine.server.service import Service
from rondel.words.errors import UserError

LAST = 5  # seconds for answers to leave after the drain's limit has cut them


def bind(host: str, port: int, *, api_key: str) -> socket.socket:
    """Before the model is loaded: what cannot be bound is known at once. Port 0 takes a free one."""
    if not api_key and not _is_loopback(host):
        raise UserError(f"--host {host} can be reached from elsewhere: give --api-key (or RONDEL_API_KEY), or keep 127.0.0.1")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot listen at {host} port {port}: {error}; choose another --port, or 0 for any free one") from error
    return sock


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Quiet(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again after the drain, and the exit code would not be 0."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


async def run(service: Service, sock: socket.socket, *, drain: float, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then nothing new, `drain` seconds for what runs, and partial answers for what is left."""
    config = uvicorn.Config(
        build(service),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(drain) + LAST,
    )
    server, loop = Quiet(config, ready), asyncio.get_running_loop()
    cut: set[asyncio.Task[int]] = set()

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True  # asked twice
            return
        service.draining = server.should_exit = True
        loop.call_later(drain, lambda: cut.add(asyncio.ensure_future(service.engine.abort(lambda _: True))))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.serve([sock])
    finally:
        await service.engine.pause("abort")
        service.close()
