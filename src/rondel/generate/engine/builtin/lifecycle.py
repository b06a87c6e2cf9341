"""State of the engine: what it may do now, and for how long it may stand still.

serving ──pause──> held ──sleep──> asleep        a failed update or step: refusing, until a good update
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import get_args

from rondel.core.errors import EngineError, UserError
from rondel.core.events import Warned, emit
from rondel.core.protocols import Interrupt


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

    async def hold(self, how: Interrupt, stop: Callable[[], Awaitable[None]], wake: Callable[[], None]) -> None:
        """Held as soon as `stop` has seen the step under way end, and with drain those that have begun. A
        hold that was cut off holds nobody.
        """
        before, self.held = self.held, self.held or how != "drain"
        self.admits = how != "drain"
        try:
            await stop()
            before = self.held = True
        finally:
            self.held, self.admits = before, True
            wake()

    def begin_lease(self, seconds: float, wake: Callable[[], None]) -> None:
        """Held for at most so long; then whoever waits goes on."""
        if seconds != float("inf"):
            self._lease = asyncio.get_running_loop().call_later(seconds, self._release, seconds, wake)

    def end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None

    def _release(self, seconds: float, wake: Callable[[], None]) -> None:
        self._lease, self.held = None, False
        emit(
            Warned(
                f"the engine was paused for {seconds:g} s and nobody resumed it; it is {self.state} again at version "
                f"{self.version}"
            )
        )
        wake()


def check_interrupt(how: str) -> None:
    """UserError for what no engine knows."""
    if how not in get_args(Interrupt):
        raise UserError(f"pause('{how}'): it is one of {', '.join(get_args(Interrupt))}")
