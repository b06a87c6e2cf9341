"""An event loop whose time is virtual."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Passes:
    """Real seconds of the passes of a loop, to one part in a hundred: as many numbers after an
    hour as after a minute.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        self.counts[round(100 * math.log(max(seconds, 1e-9)))] += 1
        self.longest = max(self.longest, seconds)

    def seconds_at(self, share: float) -> float:
        """As long as this share of them at most was: 0.99 is the 99th percentile."""
        left = share * self.counts.total()
        for log, n in sorted(self.counts.items()):
            left -= n
            if left <= 0:
                return math.exp(log / 100)
        return self.longest


class VirtualLoop(asyncio.SelectorEventLoop):
    """The clock jumps to the next timer when nothing is ready, unless it stands
    `still`. `passes` are those of the loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.passes, self._since = 0.0, Passes(), time.perf_counter()
        self._still = 0
        self._poll, self._selector.select = self._selector.select, self._advance_clock  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    @contextmanager
    def freeze_clock(self) -> Iterator[None]:
        """While something real is waited for: a thread's work takes no virtual time."""
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1

    def _advance_clock(self, timeout: float | None = None) -> list[Any]:
        self.passes.add(time.perf_counter() - self._since)
        if self._still and timeout:
            timeout = None
        self.now += timeout or 0.0
        events = self._poll(0 if timeout is not None else None)
        self._since = time.perf_counter()
        return events  # type: ignore[no-any-return]
