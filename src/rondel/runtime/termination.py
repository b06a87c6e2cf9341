"""How a run is asked to end: SIGTERM of a scheduler that wants the machine back, Ctrl-C of a
person, SIGHUP of a terminal that was closed.

first     the run keeps what it has learned in a checkpoint and ends; what it began cheaply is given up
second    the end, at once: no process of the run is left, and the last checkpoint stands
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from rondel.core.errors import Stopped
from rondel.system.signals import handled_signals

ONE = 1.0  # seconds within which several signals are one: a launcher forwards what the whole group has got


class GracefulStop:
    """`with Ending() as ending:` on the main thread. `asked` is the number of the first signal, or 0.

    While nobody awaits `wait` there is nothing to keep: the first signal raises Stopped where the program is.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._since = 0.0
        self._waits: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle_signal) for number in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def wait(self) -> None:
        """Until the run is asked to end."""
        event = asyncio.Event()
        self._waits = asyncio.get_running_loop(), event
        try:
            await event.wait()
        finally:
            self._waits = None

    def stopped_at(self, state: str) -> Stopped:
        return Stopped(
            f"stopped by {signal.Signals(self.asked).name} {state}; continue with the same command", self.asked
        )

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if time.monotonic() - self._since > ONE:
                os._exit(128 + number)  # the workers end with this process
            return
        self.asked, self._since = number, time.monotonic()
        if self._waits is None:
            raise self.stopped_at("while it was starting")
        loop, event = self._waits
        loop.call_soon_threadsafe(event.set)
