"""JSON over HTTP to one server. Whatever goes wrong names the address, the endpoint,
what came back, and what to do about it.
"""

from __future__ import annotations

import os
from typing import Any

from rondel.core.errors import EngineError, StalledError
from rondel.system.http.client import client_settings, import_httpx, require_address, shorten_body
from rondel.text.unicode import read_json

DEADLINE = 60.0  # seconds for an answer that nothing is computed for


class ServerClient:
    """`await link.post("/generate", {...})`. A key in RONDEL_API_KEY goes along as a bearer token.

    remedy     what to try if nobody answers
    transport  of httpx2; None is the network
    """

    def __init__(self, url: str, *, remedy: str, transport: Any = None) -> None:
        self.url, self.remedy = require_address("engine.url", url), remedy
        self._http = import_httpx("an engine behind a URL")
        self._settings: dict[str, Any] = {
            "base_url": self.url,
            **client_settings(self._http, os.environ.get("RONDEL_API_KEY", "")),
            "trust_env": False,  # a proxy is for the world outside
            "transport": transport,
        }
        self._client: Any = None

    async def post(self, path: str, body: dict[str, Any] | None = None, *, deadline: float | None = DEADLINE) -> Any:
        return await self._send_request("POST", path, body, deadline)

    async def get(self, path: str, *, deadline: float | None = DEADLINE) -> Any:
        return await self._send_request("GET", path, None, deadline)

    def get_blocking(self, path: str) -> Any:
        """GET from code without an event loop."""
        try:
            with self._http.Client(**self._settings) as link:
                return self._read_reply(path, link.get(path, timeout=DEADLINE))
        except self._http.HTTPError as error:
            raise self._connection_error(path, error) from error

    async def _send_request(self, verb: str, path: str, body: dict[str, Any] | None, deadline: float | None) -> Any:
        if self._client is None:
            self._client = self._http.AsyncClient(**self._settings)
        try:
            wait = self._http.Timeout(deadline, connect=DEADLINE)
            return self._read_reply(path, await self._client.request(verb, path, json=body, timeout=wait))
        except self._http.ReadTimeout as error:
            raise StalledError(f"{self.url}{path} has not answered for {deadline:g} s; {self.remedy}") from error
        except self._http.HTTPError as error:
            raise self._connection_error(path, error) from error

    def _connection_error(self, path: str, error: Exception) -> EngineError:
        return EngineError(f"{self.url}{path} cannot be reached ({type(error).__name__}: {error}): {self.remedy}")

    def _read_reply(self, path: str, reply: Any) -> Any:
        if reply.status_code != 200:
            raise ServerRefusal(
                f"{self.url}{path} answered {reply.status_code}: {shorten_body(reply.text)}", reply.status_code
            )
        if not reply.content:
            return {}
        try:
            return read_json(reply.content)
        except (ValueError, RecursionError):
            return {"text": reply.text}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


class ServerRefusal(EngineError):
    """The server answered, and said no."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
