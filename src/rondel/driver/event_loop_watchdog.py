"""Where the event loop stood still: a thread looks at the loop's stack when nothing in it has moved for a while."""

from __future__ import annotations

import asyncio
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

from rondel.system.threads import current_frames

LATE = 0.25  # seconds
EVERY = 0.02
SHOWN = 5  # places that are named
OURS = str(Path(__file__).parents[1])
LIBRARY = sysconfig.get_paths()["stdlib"]


class EventLoopWatchdog:
    """`with EventLoopWatchdog() as stalls: await ...` -> stalls.longest, and stalls.describe():
    "1.0 s at my_env.py:12".

    Only code that is neither Rondel's nor Python's counts, without the time that the machine was busy elsewhere.
    Each place counts by itself: a library that was slow once does not hide the line that blocks.

    seconds_at  place -> longest time in seconds that the loop stood still there
    """

    def __init__(self) -> None:
        self.seconds_at, self._beat = dict[str, float](), time.monotonic()
        self._over = threading.Event()
        self._loop, self._queue = threading.get_ident(), Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._waited = self._in_queue()

    def __enter__(self) -> EventLoopWatchdog:
        self._pulse = asyncio.get_running_loop().create_task(self._beat_forever())
        threading.Thread(target=self._watch_loop, daemon=True, name="stalls").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._pulse.cancel()

    @property
    def longest(self) -> float:
        """Seconds; 0 where the loop stood still nowhere."""
        return max(self.seconds_at.values(), default=0.0)

    def describe(self) -> str:
        """Its longest places, the longest first: "1.03 s at my_env.py:12 in run, 0.31 s at client.py:7 in get"."""
        places = sorted(self.seconds_at.items(), key=lambda place: -place[1])
        more = f" and at {len(places) - SHOWN} other places" if len(places) > SHOWN else ""
        return ", ".join(f"{seconds:.2f} s at {where}" for where, seconds in places[:SHOWN]) + more

    async def _beat_forever(self) -> None:
        while True:
            self._beat, self._waited = time.monotonic(), self._in_queue()
            await asyncio.sleep(EVERY)

    def _watch_loop(self) -> None:
        while not self._over.wait(EVERY):
            late = time.monotonic() - self._beat - (self._in_queue() - self._waited)
            if late > LATE and (frame := _foreign_frame(current_frames().get(self._loop))):
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
                self.seconds_at[where] = max(self.seconds_at.get(where, 0.0), late)

    def _in_queue(self) -> float:
        """Seconds that the loop's thread was ready to run and another had the processor;
        0 where the system does not say.
        """
        try:
            return int(self._queue.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0


def _foreign_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of somebody else's in what the loop is at; none while it
    imports a module, which it does once.
    """
    found = None
    while frame is not None and frame.f_code.co_filename != asyncio.events.__file__:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return None
        if (
            found is None
            and not name.startswith(OURS)
            and (not name.startswith(LIBRARY) or "site-packages" in name)
            and not name.startswith("<frozen")
        ):
            found = frame
        frame = frame.f_back
    return found
