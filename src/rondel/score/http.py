"""JSON to a server that scores: a rate limit, a limit of open calls, and patience with
what passes (429, 5xx, a lost connection).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import defaultdict
from typing import Any

from rondel.core.errors import ConfigError, RewardError
from rondel.score.clock import pause_clock
from rondel.system.http.client import client_settings, import_httpx, require_address, shorten_body
from rondel.text.unicode import read_json

PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LONGEST_WAIT = 60.0


class Post:
    """`await Post(url, key_env="JUDGE_KEY", per_minute=60)(body)` -> the JSON of the reply,
    or RewardError that says what came instead.

    key_env     name of the environment variable with the key, sent as a bearer token; "" sends none
    together    calls open at once
    per_minute  calls begun in a minute; 0 is no limit
    tries       of one call. Between them it waits what Retry-After says, else 0.5 s, 1 s, 2
                s ... and a little by chance
    seconds     that one try may take
    """

    def __init__(
        self,
        url: str,
        *,
        key_env: str = "",
        together: int = 16,
        per_minute: float = 0,
        tries: int = 4,
        seconds: float = 60.0,
        name: str,
    ) -> None:
        self._http = import_httpx(f"reward '{name}'")
        require_address(f"reward '{name}': url", url)
        if key_env and not os.environ.get(key_env):
            raise ConfigError(f"reward '{name}': key_env = {key_env!r}, and this environment variable is not set")
        if together < 1 or tries < 1 or per_minute < 0 or not seconds > 0:
            raise ConfigError(
                f"reward '{name}': together = {together}, tries = {tries}, per_minute = {per_minute}, seconds = "
                f"{seconds}; they are positive"
            )
        self.url, self.name, self.tries = url, name, tries
        self.counts: dict[str, float] = defaultdict(float)
        self._settings = client_settings(self._http, os.environ[key_env] if key_env else "")
        self._seconds, self._gap = seconds, 60.0 / per_minute if per_minute else 0.0
        self._places, self._next = asyncio.Semaphore(together), 0.0
        self._client: Any = None

    async def __call__(self, body: dict[str, Any]) -> Any:
        with pause_clock():
            await self._places.acquire()
        try:
            return await self._post_with_retries(body)
        finally:
            self._places.release()

    async def _post_with_retries(self, body: dict[str, Any]) -> Any:
        for attempt in range(self.tries):
            await self._wait_for_turn()
            began = time.monotonic()
            self.counts[f"{self.name}_calls"] += 1
            try:
                reply = await self._open_client().post(self.url, json=body)
            except self._http.HTTPError as error:
                why, wait = f"cannot be reached ({type(error).__name__}: {error})", None
            else:
                why, wait = (
                    f"answered {reply.status_code}: {shorten_body(reply.text)}",
                    reply.headers.get("retry-after"),
                )
                if reply.status_code == 200:
                    try:
                        return read_json(reply.content)
                    except (ValueError, RecursionError):
                        why = f"answered what is no JSON: {shorten_body(reply.text)}"
                elif reply.status_code not in PASSING:
                    break
            finally:
                self.counts[f"{self.name}_seconds"] += time.monotonic() - began
            if attempt + 1 < self.tries:
                self.counts[f"{self.name}_retries"] += 1
                with pause_clock():
                    await asyncio.sleep(_retry_delay(wait, attempt))
        self.counts[f"{self.name}_failures"] += 1
        raise RewardError(f"{self.url} {why}")

    async def _wait_for_turn(self) -> None:
        """Calls begin one after another, `60 / per_minute` seconds apart."""
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._gap
        if at > now:
            with pause_clock():
                await asyncio.sleep(at - now)

    def _open_client(self) -> Any:
        if self._client is None:
            self._client = self._http.AsyncClient(**self._settings, timeout=self._seconds)
        return self._client


def _retry_delay(retry_after: str | None, attempt: int) -> float:
    """Retry-After in seconds; a date, or nothing, is the backoff."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(retry_after or "")))
    except ValueError:
        return min(LONGEST_WAIT, 0.5 * 2**attempt * (1 + 0.25 * random.random()))
