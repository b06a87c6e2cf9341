"""The clock of the call that is running, for whoever makes it wait without its fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CLOCK: ContextVar[asyncio.Timeout | None] = ContextVar("rondel_reward_clock", default=None)


@contextmanager
def stopped() -> Iterator[None]:
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
