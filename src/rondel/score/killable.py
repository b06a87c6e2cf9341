"""The parent's end of one worker process: every wait for it has a deadline, and passing it ends the process.

A plain subprocess and not one of `multiprocessing`: that would run the user's main script once more in every worker (and import
the torch it imports, or refuse to start where the script has no `if __name__ == "__main__"`).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Event, Timer
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
        late = Event()

        def expire() -> None:
            late.set()
            self.kill()

        timer = Timer(seconds, expire)
        timer.start()
        jobs, replies = self.process.stdin, self.process.stdout
        assert jobs and replies
        try:
            jobs.write(job)
            jobs.flush()
            line = replies.readline()
        except OSError:  # the pipe broke: it is dead
            line = b""
        finally:
            timer.cancel()
            timer.join()  # after this, `late` says whether it was killed
        return (json.loads(line) if line.endswith(b"\n") else None), late.is_set()

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
