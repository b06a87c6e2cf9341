"""The parent's end of one worker process: every wait for it has a deadline, and passing it ends the process.

A plain subprocess and not one of `multiprocessing`: that would run the user's main script once more in every worker (and import
the torch it imports, or refuse to start where the script has no `if __name__ == "__main__"`).
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from rondel.score import Spec
from rondel.words.errors import ConfigError

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rondel.score.worker import main; main()"
START_SECONDS = 120.0  # a worker imports the user's module; on a cold disk that takes its time


class Worker:
    """One process with the reward built in it."""

    def __init__(self, spec: Spec) -> None:
        path = [entry or os.getcwd() for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's affair; and what a reward started dies with it
        )
        hello, late = self.ask(pickle.dumps((spec, os.getpid())), START_SECONDS)
        if hello is None or "error" in hello:
            why = f"it did not start within {START_SECONDS:.0f} s" if late else self.last_words() if hello is None else hello["error"]
            self.kill()
            raise ConfigError(f"task.reward = {spec!r}: {why}")

    def ask(self, job: bytes, seconds: float) -> tuple[dict[str, Any] | None, bool]:
        """(reply, killed for being late); no reply when the process died."""
        try:
            line = self._exchange(job, time.monotonic() + seconds)
        except TimeoutError:
            self.kill()
            return None, True
        except OSError:  # the pipe broke: it is dead
            return None, False
        return (json.loads(line) if line.endswith(b"\n") else None), False

    def _exchange(self, job: bytes, deadline: float) -> bytes:
        """Write the job, read one line. Neither can block past the deadline: a ready pipe takes or gives a page."""
        assert self.process.stdin and self.process.stdout
        jobs, replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        rest, line = memoryview(job), b""
        while rest:
            _until_ready(jobs, select.POLLOUT, deadline)
            rest = rest[os.write(jobs, rest[: select.PIPE_BUF]) :]
        while not line.endswith(b"\n"):
            _until_ready(replies, select.POLLIN, deadline)
            piece = os.read(replies, 1 << 16)
            if not piece:
                break
            line += piece
        return line

    def last_words(self) -> str:
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"it ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def kill(self) -> None:
        """Ends the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _until_ready(fd: int, what: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, what)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
