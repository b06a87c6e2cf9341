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
OURS = str(Path(__file__).parents[1])
LIBRARY = sysconfig.get_paths()["stdlib"]


class EventLoopWatchdog:
    """`with Stalls() as stalls: await ...` -> stalls.longest, and stalls.where: "my_env.py:12 in run".

    Only code that is neither this house's nor Python's counts, without the time that the machine was busy elsewhere.
    """

    def __init__(self) -> None:
        self.longest, self.where, self._beat = 0.0, "", time.monotonic()
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

    async def _beat_forever(self) -> None:
        while True:
            self._beat, self._waited = time.monotonic(), self._in_queue()
            await asyncio.sleep(EVERY)

    def _watch_loop(self) -> None:
        while not self._over.wait(EVERY):
            late = time.monotonic() - self._beat - (self._in_queue() - self._waited)
            if late > max(LATE, self.longest) and (frame := _foreign_frame(current_frames().get(self._loop))):
                self.longest = late
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"

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
