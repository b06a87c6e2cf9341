"""Time accounts: a step cut into laps that add up to the step by construction (law 13)."""

from __future__ import annotations

import time


class PhaseTimer:
    """A stopwatch over one worker's time: every moment belongs to exactly one lap.

    >>> clock = Laps()
    >>> clock.lap("wait"); clock.lap("train")
    >>> sorted(clock.turn())
    ['step', 'train', 'wait']
    """

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def record_phase(self, name: str) -> None:
        """The time since the last lap belongs to `name`."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def finish_step(self) -> dict[str, float]:
        """Every lap since the last turn, and `step`, their sum; the next turn begins now."""
        laps = {**self._laps, "step": self._last - self._started}
        self._laps, self._started = {}, self._last
        return laps
