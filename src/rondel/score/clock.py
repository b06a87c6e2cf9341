"""The clock of each call that is open, for whoever makes it wait without its fault, and the episode it is about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

CLOCK: ContextVar[asyncio.Timeout | None] = ContextVar("rondel_reward_clock", default=None)


# of the call, what its answer was called while it was written; None where nobody watched it
EPISODE: ContextVar[int | None] = ContextVar("rondel_reward_episode", default=None)


class CallClocks:
    """Those of all calls that one event loop serves; `beat` tells the pool that the process is alive."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self.open: set[asyncio.Timeout] = set()
        self.beat = beat

    def extend_deadlines(self, seconds: float, own: asyncio.Timeout | None) -> None:
        """The loop stood still for a synchronous reward of one call: that was on the clock of no other."""
        for clock in self.open:
            if clock is not own and not clock.expired() and (until := clock.when()) is not None:
                clock.reschedule(until + seconds)
        self.beat()


CLOCKS: ContextVar[CallClocks | None] = ContextVar("rondel_reward_clocks", default=None)


def call_with_clock(reward: Callable[..., Any], *given: Any) -> Any:
    """What the reward returns, or an awaitable of it. While a synchronous one runs, the
    clocks of the other calls stand still.
    """
    if (clocks := CLOCKS.get()) is None:
        return reward(*given)
    now = asyncio.get_running_loop().time
    began = now()
    try:
        return reward(*given)
    finally:
        clocks.extend_deadlines(now() - began, CLOCK.get())


@contextmanager
def pause_clock() -> Iterator[None]:
    """What passes inside is not on the clock: a turn that a rate limit gives, a place in a batch."""
    clock, loop = CLOCK.get(), asyncio.get_running_loop()
    until = clock.when() if clock else None
    if clock is None or until is None:
        yield
        return
    left = until - loop.time()
    clock.reschedule(None)
    try:
        yield
    finally:
        clock.reschedule(loop.time() + left)
