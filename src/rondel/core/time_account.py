"""The time of day, and time accounts of a worker and of a step (law 13): every moment since it began belongs to
exactly one kind, so the shares sum to 100 %, and the laps of a step to the step.
"""

from __future__ import annotations

import time
from collections import defaultdict

from rondel.core.events import WorkerTime, emit
from rondel.system.process_memory import resident_memory

ORIGIN = time.time() - time.monotonic()  # read once when this process began
MOST = 256  # laps of one telling that are told in order; of more only the sums


def now() -> float:
    """Seconds since 1970, by a clock that nobody sets: differences are durations. What sets the machine's clock
    meanwhile, or puts it to sleep, makes no step longer.
    """
    return ORIGIN + time.monotonic()


class TimeAccount:
    """What one worker does, as it says itself.

    >>> account = TimeAccount("engine"); account.switch_to("generate"); account.switch_to("idle")
    >>> sorted(account.seconds)
    ['generate', 'idle']
    """

    def __init__(self, worker: str, doing: str = "idle") -> None:
        self.worker, self.doing = worker, doing
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.laps: list[tuple[str, float]] = []
        self._since = time.perf_counter()

    def switch_to(self, doing: str) -> None:
        """The time until now belongs to what it did; from now on it does this."""
        if doing != self.doing:
            self._add_lap()
            self.doing = doing

    def report_time(self, held: dict[str, int] | None = None) -> None:
        """What has passed since it last told, and the bytes of its tenants."""
        self._add_lap()
        until = time.time()
        laps = self.laps if len(self.laps) <= MOST else []
        emit(
            WorkerTime(
                self.worker,
                dict(self.seconds),
                {name: n for name, n in self.counts.items() if n},
                laps,
                resident_memory() | (held or {}),
                until,
            )
        )
        self.laps = []
        self.seconds.clear()
        self.counts.clear()

    def _add_lap(self) -> None:
        now = time.perf_counter()
        self.seconds[self.doing] += now - self._since
        if len(self.laps) <= MOST:
            self.laps.append((self.doing, round(now - self._since, 6)))
        self._since = now


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
