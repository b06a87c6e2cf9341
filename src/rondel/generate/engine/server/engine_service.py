"""What a server knows whatever its engine draws: the engine, its limits, its counters,
and who is promised an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rondel.generate.engine.server.metrics import CacheMetrics, ServerMetrics
from rondel.system.http.response import RequestRefusal


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one client may cost the others.

    body      bytes of a request; 0 is 4 MiB, and 64 MiB for a model that sees images
    samples   answers of one request, prompts times n
    queue     answers at once, running and waiting; more are told to come back (429)
    deadline  seconds after which an answer is given up, so that a drain ends
    """

    body: int = 0
    samples: int = 128
    queue: int = 1024
    deadline: float = 3600.0

    def with_body(self, megabytes: int) -> RequestLimits:
        """The same, with so many MiB where no limit of a body was asked for."""
        return self if self.body else replace(self, body=megabytes << 20)


class EngineService:
    """`run` executes on the device's thread."""

    engine: Any

    def __init__(
        self, engine: Any, *, run: Callable[..., Awaitable[Any]], name: str, limits: RequestLimits, api_key: str = ""
    ) -> None:
        self.engine, self.run, self.name, self.limits, self.api_key = engine, run, name, limits, api_key
        self.metrics = CacheMetrics(self) if hasattr(engine, "scheduler") else ServerMetrics(self)
        self.updating = asyncio.Lock()
        self.open = 0  # answers promised and not yet given
        self.draining = False

    def close(self) -> None:
        """Behind the last answer."""

    @contextmanager
    def reserve_queue_slots(self, n: int) -> Iterator[None]:
        """A place in the queue for n answers."""
        if n > min(self.limits.samples, self.limits.queue):
            raise RequestRefusal(
                400,
                f"prompts x n = {n} answers; this server gives at most {self.limits.samples} to one request",
                param="n",
            )
        if self.open + n > self.limits.queue:
            raise RequestRefusal(
                429,
                f"{self.open} answers are being written or wait, {self.limits.queue} are this server's limit: come "
                "back later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.open += n
        try:
            yield
        finally:
            self.open -= n
