"""A clock that stands while its process is stopped, and event loops that keep time by it: no wait in them is over
because nobody ran, be it for Ctrl-Z and `fg` an hour later, a debugger or a frozen container.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
BEAT = 0.5  # seconds between two beats of this process
GAP = 1.0  # seconds that pass between two beats at most: what is more was a stop


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
