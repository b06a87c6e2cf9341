"""The fork server of a run that was itself forked: it begins with all that its parent has imported, where an interpreter of
its own would take three seconds of a core to import torch and transformers once more.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing.forkserver
import os
import re
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rondel.runtime.cluster import forkserver

SERVES = re.compile(
    rb"\0rondel\.runtime\.cluster\.forkserver\0\d+\0for\0(\d+)"
)  # a child of the clean server: the process id


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
    later is forked now. One that is needed after it has ended, and those that its workers ask for, as an engine of several
    processes does, are forked from the clean server. In the ordinary way: `inspect.unwrap(forkserver.start_server)`.
    """
    ours, theirs = forkserver.socket_pair()
    if not (pid := os.fork()):
        try:
            ours.close()
            _become_nursery(theirs, str(theirs.fileno()))
        finally:
            os._exit(0)
    theirs.close()
    prepared: list[tuple[socket.socket, Any]] = [(ours, Nursery(pid))]

    @functools.wraps(forkserver.start_server)
    def take_server() -> tuple[socket.socket, Any]:
        return prepared.pop() if prepared else _fork_from_clean_server()

    forkserver.start_server = take_server
    atexit.register(lambda: [nursery.end() for _, nursery in prepared])


class ServerFork:
    """What is asked of a fork server that is a child of the clean server."""

    def __init__(self, process: BaseProcess) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def _fork_from_clean_server() -> tuple[socket.socket, ServerFork]:
    """In place of `forkserver.start_server`: this process has threads, and must not be forked."""
    from kits.nursery import _serve  # a worker of pytest imports its kits anew, and what is sent is found by name
    from kits.runs import context, use_clean_server

    use_clean_server(multiprocessing.forkserver._forkserver._forkserver_address)
    ours, theirs = forkserver.socket_pair()
    with theirs:
        process = context.Process(target=_serve, args=(theirs, os.getpid(), dict(os.environ)), daemon=True)
        process.start()
    return ours, ServerFork(process)


def _serve(own: socket.socket, controller: int, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # what is forked here may have children
    _become_nursery(own, str(own.fileno()), "for", str(controller))


def _become_nursery(own: socket.socket, *words: str) -> None:
    """Until the controller has closed the other end."""
    forkserver.start_server = _fork_from_clean_server  # type: ignore[assignment]
    name_process(sys.executable, "-m", "rondel.runtime.cluster.forkserver", *words)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    forkserver.main(own.detach())


def parent_of(pid: int) -> int:
    """Its parent; of a fork server from the clean server whom it serves, or 1 where that has ended."""
    if found := SERVES.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
        return int(found[1]) if Path(f"/proc/{int(found[1])}").exists() else 1
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def name_process(*words: str) -> None:
    """What `ps` shows of this process, as if it had been started so: tests tell processes by it. The words lie where those of
    the server lie from which this was forked, which are longer.
    """
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
    told = b"\0".join(word.encode() for word in words)
    assert len(told) < end - start
    ctypes.memmove(start, told.ljust(end - start, b"\0"), end - start)
