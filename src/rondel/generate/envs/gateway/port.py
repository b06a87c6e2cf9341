"""The gateway's port on loopback: open while an episode runs, and closed with the last one."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rondel.generate.envs.gateway.app import build_app
from rondel.system.http.server import HttpServer

if TYPE_CHECKING:
    from rondel.generate.envs.gateway.session import GatewaySession

LAST = 2  # seconds for answers on their way when the port closes


class GatewayPort:
    """One server in the event loop of the run."""

    def __init__(self, sessions: dict[str, GatewaySession], warn: Callable[[str, str], None]) -> None:
        # asyncio turns Nagle's delay off only where it reads TCP, and what accept() returns
        # says what its listener says: 40 ms a turn
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        # agents think long between two requests
        self.server = HttpServer(build_app(sessions, warn), self.socket, drain=LAST, keep_alive=600)
        self.started = asyncio.ensure_future(self.server.open())
        self.users = 0

    async def close(self) -> None:
        await asyncio.wait([self.started])
        await self.server.close()


class GatewayListener:
    """`async with listening.to(session) as (url, key)`: the key is known for as long."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self.sessions: dict[str, GatewaySession] = {}
        self.warn = warn
        self.port: GatewayPort | None = None

    @asynccontextmanager
    async def serve_session(self, session: GatewaySession) -> AsyncIterator[tuple[str, str]]:
        key = f"rondel-{secrets.token_urlsafe(24)}"
        port = self.port = self.port or GatewayPort(self.sessions, self.warn)
        port.users += 1
        try:
            await asyncio.shield(port.started)
            self.sessions[key] = session
            yield port.url, key
        finally:
            self.sessions.pop(key, None)
            port.users -= 1
            if not port.users:
                self.port = None
            try:
                await session.close()
            finally:
                if not port.users:
                    await asyncio.shield(port.close())
