"""Activity of another process of this machine, as the kernel tells it from outside.

A worker that imports says nothing for as long as a C extension holds the interpreter, and neither does one that was
stopped. The kernel knows the difference: the first one computes, reads, or waits for a disk.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

COMPUTES = 0.05  # share of a processor above which it computes; threads that wait for the interpreter take 0.02
LOOK = 2.0  # seconds that count at most between two looks: who looks may have been stopped itself
RUNS, DISK, STOPPED = "R", "D", {"T", "t"}  # states of a thread: proc(5)


class ProcessActivity:
    """`look()` now and then, and `idle_seconds` is how long the process has done nothing; 0 where nothing is known of
    it: it has ended, or this is no Linux.

    is_stopped  by a signal or a debugger, at the last look
    is_running  a thread of it computes, or waits for a processor or a disk, at the last look
    """

    def __init__(self, pid: int) -> None:
        self._folder, self._hertz = Path(f"/proc/{pid}"), os.sysconf("SC_CLK_TCK")
        self.idle_seconds, self.is_stopped, self.is_running = 0.0, False, False
        self._at, self._cpu, self._bytes, self._states = time.monotonic(), -1.0, -1, set[str]()

    def look(self) -> None:
        now = time.monotonic()
        try:
            cpu, moved, states = self._cpu_seconds(), self._io_bytes(), self._thread_states()
        except (OSError, ValueError, IndexError):
            self.idle_seconds, self.is_stopped, self.is_running, self._cpu = 0.0, False, False, -1.0
            return
        stopped = bool(states) and states <= STOPPED
        if (
            self._cpu < 0
            or stopped != self.is_stopped
            or cpu - self._cpu > COMPUTES * (now - self._at)
            or moved != self._bytes
            or DISK in states
            or RUNS in states & self._states  # twice: it waits for a processor
        ):
            self.idle_seconds = 0.0
        else:
            self.idle_seconds += min(now - self._at, LOOK)
        self.is_stopped, self.is_running = stopped, bool(states & {RUNS, DISK})
        self._at, self._cpu, self._bytes, self._states = now, cpu, moved, states

    def _cpu_seconds(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / self._hertz

    def _io_bytes(self) -> int:
        """Read and written, files and what the disk had to fetch."""
        rows = dict(line.split(": ") for line in (self._folder / "io").read_text().splitlines())
        return sum(int(rows.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))

    def _thread_states(self) -> set[str]:
        return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in (self._folder / "task").iterdir()}


def pid_namespace() -> str:
    """Processes that tell the same know each other by their numbers; "" where /proc tells nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
