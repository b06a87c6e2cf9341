"""Where a server listens and who may speak to it: bound before anything is loaded, closed without a signal of uvicorn's. No torch: the dashboard has it too."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import Request

from rondel.words.errors import UserError
from rondel.words.sockets import is_loopback


def bind(host: str, port: int, *, api_key: str) -> socket.socket:
    """Before anything is loaded: what cannot be bound is known at once. Port 0 takes a free one."""
    if not api_key and not is_loopback(host):
        raise UserError(f"--host {host} can be reached from elsewhere: give --api-key (or RONDEL_API_KEY), or keep 127.0.0.1")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot listen at {host} port {port}: {error}; choose another --port, or 0 for any free one") from error
    return sock


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


def from_a_web_page(request: Request) -> bool:
    """Without a key, any page open in a browser on this machine could steer a server; programs send none of these headers."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    try:
        if origin is not None and urlsplit(origin).netloc != host:
            return True
        return (urlsplit(f"//{host}").hostname or "localhost") not in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return True
