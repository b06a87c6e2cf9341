"""The parent's end of one worker process: every wait for it has a deadline, and passing it ends the process.

A plain subprocess and not one of `multiprocessing`: that would run the user's main
script once more in every worker (and import the torch it imports, or refuse to start where
the script has no `if __name__ == "__main__"`).
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondel.core.clocks import poll_until, running_time
from rondel.core.errors import ConfigError
from rondel.core.given_objects import pack_given
from rondel.core.types import Failed, Score, Trajectory

if TYPE_CHECKING:
    from rondel.score import Spec

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rondel.score.worker import main; main()"
START_SECONDS = 120.0  # a worker imports the user's module; on a cold disk that takes its time
Asked = Trajectory | list[Trajectory]  # one answer, or those of a group together
Result = Score | Failed | list[Score | Failed]


def without_arrays(asked: Asked) -> Asked:
    """What travels to a worker: records of experts and pictures are large, and a task's images are in its data."""
    if isinstance(asked, list):
        return [replace(trajectory, experts=None, media=[]) for trajectory in asked]
    return replace(asked, experts=None, media=[])


def read_reply(reply: dict[str, Any]) -> Result:
    if "group" in reply:
        return [Score(**one) if "value" in one else Failed(**one) for one in reply["group"]]
    return Score(**reply) if "value" in reply else Failed(**reply)


class RewardProcess:
    """One process with the reward built in it."""

    def __init__(
        self,
        spec: Spec,
        *,
        timeout: float,
        folder: str | None = None,
        lends: dict[str, str] | None = None,
        asleep: bool = False,
    ) -> None:
        path = [entry or os.getcwd() for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's affair; and what a reward started dies with it
        )
        hello, late = self.run_jobs(
            [pickle.dumps((spec, os.getpid(), timeout, folder, lends or {}, asleep, pack_given()))], START_SECONDS
        )
        if not hello or "error" in hello[0]:
            why = (
                hello[0]["error"]
                if hello
                else f"it did not start within {START_SECONDS:.0f} s"
                if late
                else self.last_words()
            )
            self.kill()
            raise ConfigError(f"task.reward = {spec!r}: {why}")
        self.together: int = hello[0]["together"]
        self.naps, self.memory = bool(hello[0]["naps"]), int(hello[0]["memory"])
        self.groupwise = bool(hello[0]["groupwise"])
        self.maximum: float | None = hello[0]["maximum"]
        self.separators = tuple(hello[0]["separators"])

    def run_jobs(self, jobs: Sequence[bytes], seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """(replies in order, killed for being late). Where there are fewer replies than
        jobs, it ended at the first one without.

        The clock of a job starts with the reply to the one before.
        """
        assert self.process.stdin and self.process.stdout
        there, back = self.process.stdin.fileno(), self.process.stdout.fileno()
        rest, said = memoryview(b"".join(jobs)), b""
        replies: list[dict[str, Any]] = []
        deadline = running_time() + seconds
        poll = select.poll()
        poll.register(back, select.POLLIN)
        poll.register(there, select.POLLOUT)
        try:
            while len(replies) < len(jobs):
                ready = poll_until(poll, deadline)
                if not ready:
                    self.kill()
                    return replies, True
                if back in ready:
                    piece = os.read(back, 1 << 16)
                    *lines, said = (said + piece).split(b"\n")
                    replies += map(json.loads, lines)
                    if not piece:
                        break
                    if lines:
                        deadline = running_time() + seconds
                if there in ready and rest:  # a ready pipe takes a page: neither side can block on the other
                    rest = rest[os.write(there, rest[: select.PIPE_BUF]) :]
                if not rest and there in ready:
                    poll.unregister(there)
        except OSError:  # the pipe broke: it is dead
            pass
        return replies, False

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
