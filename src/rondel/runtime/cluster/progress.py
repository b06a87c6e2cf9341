"""What advances in a worker's process: a sign of life that a deadlock does not give.

The thread that speaks for a worker lives on while everything else waits for ever, so it
says more than that it lives: how often its event loop turned, how many functions its
device thread has begun and ended, and whether
it computes, reads or writes. A function that waits for somebody else (a collective, a compiler, a
process) advances as far as its own deadline allows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from rondel.runtime import busy
from rondel.system.threads import current_frames

EVENT_LOOP = asyncio.base_events.__file__
TURN = 0.2  # seconds between two looks at the event loop
COMPUTES = 0.01  # share of a processor above which a process computes
MOVES = 1 << 16  # bytes read or written between two signs that are more than the signs themselves
ELSEWHERE = (
    "/torch/distributed/",
    "/torch/_inductor/",
    "/rondel/models/collectives.py",
    "/rondel/models/pipeline_stage.py",
    "/rondel/train/fsdp.py",
    "/rondel/sync/",
    "/subprocess.py",
    "/multiprocessing/",
)  # places of the source that wait for others, each with a deadline, or for a process whose end is theirs


class WorkerProgress:
    """`WorkerProgress().sign()` differs from the last one if anything advanced meanwhile.
    Made in the thread of the event loop.
    """

    def __init__(self) -> None:
        busy.is_watched = True
        self.turns = self.signs = 0
        self.reads = False  # a message: what it is made of is imported, and that is no turn of the event loop
        self._loop = threading.get_ident()
        self._at, self._cpu, self._bytes = time.monotonic(), time.process_time(), _io_bytes()

    async def count_turns(self) -> None:
        """Runs on the event loop for as long as it does."""
        while True:
            self.turns += 1
            await asyncio.sleep(TURN)

    def liveness_sign(self) -> tuple[int, ...]:
        now, cpu, moved = time.monotonic(), time.process_time(), _io_bytes()
        if cpu - self._cpu > COMPUTES * (now - self._at) or moved - self._bytes > MOVES or self._waits_for_others():
            self.signs += 1
        self._at, self._cpu, self._bytes = now, cpu, moved
        begun, ended = busy.begun, busy.ended
        return (self.signs, begun, ended, self.turns if begun == ended and not self.reads else 0)

    def _waits_for_others(self) -> bool:
        named = {thread.ident for thread in threading.enumerate() if thread.name.startswith("rondel-")}
        for ident, frame in current_frames().items():
            # beneath an event loop is who started this process, which may be multiprocessing
            while frame is not None and ident in named | {self._loop} and frame.f_code.co_filename != EVENT_LOOP:
                if any(place in frame.f_code.co_filename for place in ELSEWHERE):
                    return True
                frame = frame.f_back  # type: ignore[assignment]
        return False


def _io_bytes() -> int:
    """Read and written by this process, files and what the disk had to fetch."""
    try:
        rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return sum(int(rows[name]) for name in ("rchar", "wchar", "read_bytes"))
    except (OSError, ValueError, KeyError):
        return 0
