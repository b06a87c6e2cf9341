"""Workers of a reward pool that are forked from the clean server: a reward with a model begins with torch imported, where an
interpreter of its own takes six seconds of a core. What every pool does is in test_rewards.py, by interpreters.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

from kits.runs import context


class ForkedWorker:
    """The part of `subprocess.Popen` that a pool asks of a worker."""

    def __init__(self, command: list[str], **how: Any) -> None:
        assert how == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        read, written = os.pipe()
        heard, told = os.pipe()
        self._process = context.Process(target=_serve, args=([DupFd(read), DupFd(told), DupFd(2)], command[-1]))
        self._process.start()
        os.close(read)
        os.close(told)
        self.stdin, self.stdout, self.pid = os.fdopen(written, "wb", 0), os.fdopen(heard, "rb", 0), self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("reward worker", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_reward_workers(monkeypatch: Any) -> None:
    from rondel.score import killable_process

    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired, "Popen": ForkedWorker}
    monkeypatch.setattr(killable_process, "subprocess", SimpleNamespace(**names))


def _serve(ends: list[DupFd], path: str) -> None:
    os.setsid()
    for own, end in enumerate(ends):
        descriptor = end.detach()
        os.dup2(descriptor, own)
        os.close(descriptor)
    sys.path[:] = json.loads(path)
    from rondel.score import worker

    worker.die_with = lambda parent: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the server is its parent
    worker.main()
    os._exit(0)
