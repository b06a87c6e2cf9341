"""Where a server listens, who may speak to it and how long it waits for them: bound before
anything is loaded, closed without a signal of uvicorn's. No torch: the dashboard and the gateway have it too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

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


class PatientConnection(H11Protocol):
    """One client's. Closed where a request's headers are not there `HEADERS` seconds after it
    connected or sent their first byte, and at the server's end where a request has not come
    whole: uvicorn waits for both without a limit."""

    HEADERS = 20.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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


class QuietServer(uvicorn.Server):
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


def from_a_web_page(request: Request) -> bool:
    """Without a key, any page open in a browser on this machine could steer a server;
    programs send none of these headers.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    try:
        if origin is not None and urlsplit(origin).netloc != host:
            return True
        return (urlsplit(f"//{host}").hostname or "localhost") not in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return True
