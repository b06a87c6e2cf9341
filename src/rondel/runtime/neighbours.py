"""Other programs on the processors of this one: while they work, threads that wait for each other sleep at once.

OpenMP's threads spin for some milliseconds at the end of every parallel region, which is what makes small products
fast. Beside a busy program they take the processor from the very thread that they wait for: a step of 4.3 s took 12 s
beside one loop of Python (two cores, docs/LOG.md). How long to spin libgomp reads once,
when it is loaded; but a process that has more of its threads than there are processors spins 3,000 times shorter. So a
pool of threads that do nothing is held while neighbours work, and let go when they have stopped. Nothing is computed
by other threads or by another number of them: no bit changes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from rondel.system.cpu_quota import CpuQuota, find_cpu_quota

EVERY = 0.5  # seconds between two looks
QUIET = 2  # looks without neighbours after which threads spin again
SETTINGS = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # of who decides it for good
ROOM = 0.25  # of a processor that others may use unnoticed


@cache
def libgomp() -> Any:
    """The OpenMP that torch computes with, if it is this one."""
    try:
        found = ctypes.CDLL("libgomp.so.1", mode=getattr(os, "RTLD_NOLOAD", 0))
    except OSError:
        return None
    found.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.GOMP_parallel.restype = None
    return found


class IdleThreads:
    """A pool of OpenMP's threads that do nothing, until `close()`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._made, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True, name="idle")
        self._thread.start()
        self._made.wait()

    def _hold(self) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # called with NULL
        libgomp().GOMP_parallel(nothing, None, self._count, 0)  # a region, behind which its threads belong to this one
        self._made.set()
        self._over.wait()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class NeighbourWatch:
    """Looks at the processors every half second. `threads`: of this process that compute together.

    cores   processors that these threads and the others have between them
    others  () -> seconds of processors that other programs have used so far, on those that this process may use
    """

    def __init__(
        self,
        threads: int,
        *,
        cores: float | None = None,
        others: Callable[[], float] | None = None,
        every: float = EVERY,
    ) -> None:
        self.threads = threads
        self.cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._others, self._every = others or seconds_of_others, every
        self._idle: IdleThreads | None = None
        self._quiet, self._seen = 0, (time.monotonic(), self._others())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="neighbours")

    def start(self) -> None:
        self._thread.start()

    @property
    def has_neighbours(self) -> bool:
        return self._idle is not None

    def look(self, now: float) -> None:
        """What has happened since the last look decides how threads wait from here on."""
        (before, used), self._seen = self._seen, (now, self._others())
        busy = (self._seen[1] - used) / max(now - before, 1e-9)  # processors that others had
        if self.threads + busy > self.cores + ROOM:
            self._quiet = 0
            self._idle = self._idle or IdleThreads(max(2, len(os.sched_getaffinity(0))))
        elif self._idle is not None:
            self._quiet += 1
            if self._quiet >= QUIET:
                self._idle.close()
                self._idle = None

    def _watch(self) -> None:
        with suppress(OSError, ValueError):  # what cannot be read any more changes nothing any more
            while not self._over.wait(self._every):
                self.look(time.monotonic())

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._idle is not None:
            self._idle.close()
            self._idle = None


def watch_neighbours(threads: int) -> NeighbourWatch | None:
    """Started, where threads wait for each other, nobody has said how, and the system tells what others do."""
    told = SETTINGS & os.environ.keys()
    if threads < 2 or told or not sys.platform.startswith("linux") or not os.access("/proc/stat", os.R_OK):
        return None
    if libgomp() is None:
        return None
    quota = find_cpu_quota()
    try:
        watch = NeighbourWatch(threads) if quota is None else watch_quota(threads, quota)
    except (OSError, ValueError):  # a system that tells it in another way
        return None
    watch.start()
    return watch


def watch_quota(threads: int, quota: CpuQuota, every: float = EVERY) -> NeighbourWatch:
    """Neighbours of a container with a quota are who shares that, and nobody else on a machine that it sees a part of.
    Time in which all of them were throttled is used by nobody. Not started.
    """
    return NeighbourWatch(
        threads, cores=quota.processors, others=lambda: quota.used_seconds() - time.process_time(), every=every
    )


def seconds_of_others() -> float:
    """Seconds of this process's processors in which something else ran, the host of a virtual machine included."""
    mine, ticks = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    used = 0
    with open("/proc/stat", encoding="ascii") as stat:
        for line in stat:
            name, _, rest = line.partition(" ")
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in mine:
                user, nice, system, _, _, irq, soft, steal, *_ = map(int, rest.split())
                used += user + nice + system + irq + soft + steal
    return used / ticks - time.process_time()
