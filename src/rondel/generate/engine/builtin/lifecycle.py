"""State of the engine: what it may do now, and for how long it may stand still.

serving ──pause──> held ──sleep──> asleep        a failed update or step: refusing, until a good update
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rondel.core.errors import EngineError


class EngineLifecycle:
    """
    version     the weights that serve
    broken      why it refuses; "" if it does not
    held        requests are parked
    admits      False while it drains: what has begun ends, nothing new begins
    asleep      memory tags given back
    overwrites  whether an update is writing over the weights
    """

    def __init__(self, version: int, overwrites: Callable[[], bool]) -> None:
        self.version = version
        self.broken = ""
        self.held = False
        self.admits = True
        self.asleep: set[str] = set()
        self.overwrites = overwrites
        self._lease: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        if self.broken:
            return "refusing"
        if self.asleep:
            return "asleep"
        return "held" if self.held or self.overwrites() else "serving"

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise EngineError(f"the engine refuses to generate until a good update: {self.broken}")

    def begin_lease(self, seconds: float, ended: Callable[[], None]) -> None:
        """Held for at most so long; then `ended` is told."""
        if seconds != float("inf"):
            self._lease = asyncio.get_running_loop().call_later(seconds, self._release, ended)

    def end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None

    def _release(self, ended: Callable[[], None]) -> None:
        self._lease, self.held = None, False
        ended()
