"""A server: where it listens, how long it waits for its clients, and how it ends. No torch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rondel.core.errors import UserError
from rondel.system.sockets import is_loopback


def bind_socket(host: str, port: int, *, api_key: str) -> socket.socket:
    """Before anything is loaded: what cannot be bound is known at once. Port 0 takes a free one."""
    if not api_key and not is_loopback(host):
        raise UserError(
            f"--host {host} can be reached from elsewhere: give --api-key (or RONDEL_API_KEY), or keep 127.0.0.1"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"cannot listen at {host} port {port}: {error}; choose another --port, or 0 for any free one"
        ) from error
    return sock


class ConnectionState(ServerState):
    """What the server's connections share; `ending` once it closes them."""

    ending = False


class PatientConnection(H11Protocol):
    """One client's connection, closed if the headers of a request are not complete `HEADERS` seconds after it
    connected or sent their first byte, and at the end of the server if a request is not complete or it was accepted
    too late to be told of the end. uvicorn waits for each of them without a limit.
    """

    HEADERS = 20.0
    server_state: ConnectionState

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.server_state.ending:
            transport.close()
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.close()
        else:
            super().shutdown()

    def _start_header_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._cancel_header_timer()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self.HEADERS, self.transport.close)

    def _cancel_header_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer(uvicorn.Server):
    """One ASGI application at one socket: `await server.serve()` until `stop()`, or `open()` and `close()` inside a
    loop that does other work.

    drain       seconds that answers on their way have when it ends
    keep_alive  seconds that a connection may wait for its next request
    ready       called once it listens

    Signals are the caller's: uvicorn would raise them again after the drain, and the exit code would not be 0.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        drain: int,
        keep_alive: int = 5,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=PatientConnection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=drain,
            timeout_keep_alive=keep_alive,
        )
        super().__init__(config)
        self.server_state: ConnectionState = ConnectionState()
        self.socket, self.ready = sock, ready

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets or [self.socket])

    def stop(self) -> None:
        """End after the drain; at the second call at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def open(self) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self.socket])

    async def close(self) -> None:
        await self.shutdown([self.socket])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.server_state.ending = True
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()
