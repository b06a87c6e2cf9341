"""What lives in worker processes of tests, and whether a process is alive."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time

import numpy as np

from kits.nursery import parent_of
from rondel.core.errors import ConfigError
from rondel.core.events import Warned, emit
from rondel.runtime.devices import Device


class Unreadable:
    """Goes into a pickle, and does not come out."""

    def __reduce__(self):
        return int, ("not a number",)


class Part:
    """What lives in the child."""

    def __init__(self, start: int) -> None:
        self.total, self.cancelled = start, 0

    async def add(self, n: int) -> int:
        await asyncio.sleep(0)
        self.total += n
        return self.total

    def doubled(self, values: np.ndarray) -> np.ndarray:
        return values * 2

    async def nap(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "slept"

    def how_many_cancelled(self) -> int:
        return self.cancelled

    def wrong(self) -> None:
        raise ConfigError("lr = -1: it must be positive; set trainer.lr")

    def odd(self) -> None:
        class Local(Exception):
            pass

        raise Local("nobody can unpickle me")

    def unsendable(self):
        return lambda: None

    def unreadable(self):
        return Unreadable()

    async def hangs(self) -> None:
        """The event loop waits for what nobody does."""
        threading.Event().wait()

    async def hangs_beside(self) -> None:
        """The device thread does; the event loop turns."""
        await Device(threads=1).run(threading.Event().wait)

    async def computes(self, seconds: float) -> str:
        """Holds the event loop, as a large step may."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(1000))
        return "computed"

    async def runs(self, seconds: float) -> str:
        subprocess.run(["sleep", str(seconds)], check=True)
        return "ran"

    def says(self, text: str) -> None:
        emit(Warned(text))

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def dies(self) -> None:
        print("these are my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class SlowPart(Part):
    """One that takes its time to be built: asleep, computing in C, or in C and idle. The latter two hold the
    interpreter, as an import of an extension does.
    """

    def __init__(self, way: str, seconds: float) -> None:
        super().__init__(0)
        if way == "sleep":
            time.sleep(seconds)
        until = time.monotonic() + seconds
        while way == "compute" and time.monotonic() < until:
            sum(range(1 << 26))
        if way == "hold":
            ctypes.PyDLL(None).sleep(int(seconds))


class NeverRead:
    """An argument whose unpickling waits for what nobody does, as an import may that asks a server."""

    def __reduce__(self):
        return wait_forever, ()


def wait_forever() -> None:
    threading.Event().wait()


class Waster:
    def burn(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        return "done"


def time_waster() -> Waster:
    return Waster()


def alive(pid):
    """Running; a zombie that its new parent has not collected yet counts as ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(of: int) -> list[int]:
    """Processes that this one has started."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if parent_of(int(pid)) == of:
                found.append(int(pid))
    return found
