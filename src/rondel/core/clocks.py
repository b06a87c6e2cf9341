"""Clocks and accounts of time (law 13): of the day, one that stands while its process is stopped, a worker's, a step's.

No wait on an event loop that keeps time by the second clock is over because nobody ran, be it for Ctrl-Z and `fg` an
hour later, a debugger or a frozen container. In an account every moment since it began belongs to exactly one kind, so
the shares sum to 100 %, and the laps of a step to the step.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rondel.core.events import WorkerTime, emit
from rondel.system.process_memory import resident_memory

T = TypeVar("T")
ORIGIN = time.time() - time.monotonic()  # read once when this process began
MOST = 256  # laps of one telling that are told in order; of more only the sums

BEAT = 0.5  # seconds between two beats of this process
GAP = 1.0  # seconds that pass between two beats at most: what is more was a stop


def now() -> float:
    """Seconds since 1970, by a clock that nobody sets: differences are durations. What sets the machine's clock
    meanwhile, or puts it to sleep, makes no step longer.
    """
    return ORIGIN + time.monotonic()


# -- the time in which this process ran --------------------------------------------------------------------


class RunningClock:
    """Seconds, as those of `now`, while somebody calls `beat` more often than every GAP; GAP at most while nobody does:
    a stop of any length is a second.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = (0.0, now())  # at the last beat: seconds counted until then, and `now()`

    def time(self) -> float:
        return self._read()[0]

    def beat(self) -> None:
        self._last = self._read()

    def _read(self) -> tuple[float, float]:
        (counted, at), now = self._last, self._now()
        return counted + min(now - at, GAP), now


_clock: RunningClock | None = None


def running_time() -> float:
    """Seconds in which this process ran since the first call. A thread beats."""
    global _clock
    if _clock is None:
        _clock = RunningClock()
        threading.Thread(target=_beat_forever, args=(_clock,), daemon=True, name="clock").start()
    return _clock.time()


def poll_until(poll: select.poll, deadline: float) -> dict[int, int]:
    """What is ready, by file descriptor; nothing only where `running_time` has come to the deadline."""
    while not (ready := dict(poll.poll(max(0.0, deadline - running_time()) * 1000))):
        if running_time() >= deadline:
            break
    return ready


def _beat_forever(clock: RunningClock) -> None:
    while True:
        time.sleep(BEAT)
        clock.beat()


def _forget_clock() -> None:
    """In a forked process no thread beats it."""
    global _clock
    _clock = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_clock)


class RunningTimeLoop(asyncio.SelectorEventLoop):
    """`asyncio.timeout`, `sleep` and `call_later` of it count the seconds in which this process ran."""

    time = staticmethod(running_time)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on a RunningTimeLoop."""
    with asyncio.Runner(loop_factory=RunningTimeLoop) as runner:
        return runner.run(main)


# -- accounts ------------------------------------------------------------------------------------------------


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
