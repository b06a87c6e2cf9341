"""The fork server of a run that was itself forked: it begins with all that its parent has imported, where an interpreter of
its own would take three seconds of a core to import torch and transformers once more.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time

from rondel.runtime.cluster import forkserver


class Nursery:
    """The part of `subprocess.Popen` that is asked of a fork server."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None  # type: int, int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 60.0)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("nursery", timeout or 60.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.wait()


def fork_nursery() -> None:
    """For a process that has just been forked from a clean server and has one thread still: the fork server that it may ask for
    later is forked now. One that is needed after it has ended is started in the ordinary way.
    """
    ours, theirs = forkserver.socket_pair()
    if not (pid := os.fork()):
        try:
            ours.close()
            name_process(sys.executable, "-m", "rondel.runtime.cluster.forkserver", str(theirs.fileno()))
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            forkserver.main(theirs.detach())
        finally:
            os._exit(0)
    theirs.close()
    ordinary, prepared = forkserver.start_server, [(ours, Nursery(pid))]
    forkserver.start_server = lambda: prepared.pop() if prepared else ordinary()  # type: ignore[assignment]
    atexit.register(lambda: [nursery.end() for _, nursery in prepared])


def name_process(*words: str) -> None:
    """What `ps` shows of this process, as if it had been started so: tests tell processes by it. The words lie where those of
    the server lie from which this was forked, which are longer.
    """
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    told = b"\0".join(word.encode() for word in words)
    assert len(told) < end - start
    ctypes.memmove(start, told.ljust(end - start, b"\0"), end - start)
