"""A stage as a process: `rondel train` or `rondel eval`, which ends with the pipeline that began it (law 14).

pipeline ── pipe, nothing is ever written ──> stage: the end of the pipe is the end of the pipeline,
                                              whatever that was; the stage keeps a checkpoint and ends
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rondel.system.files import guard_write, make_folder


class StageProcess(Protocol):
    """What a pipeline asks of a stage that runs."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def terminate(self) -> None:
        """Ask it to keep what it has and to end."""

    def wait(self) -> int: ...


class ChildProcess:
    """`ChildProcess(["train", "job.toml"], log, None)`.

    log      what it prints; of an evaluation only what is no result
    out      where its standard output goes, if not into the log
    cores    the only ones that it may use; empty: all
    """

    def __init__(self, words: list[str], log: Path, out: Path | None, cores: Sequence[int] = ()) -> None:
        make_folder(log.parent)
        theirs, self._alive = os.pipe()
        try:
            with (
                guard_write(log, doing="opening"),
                log.open("ab") as said,
                (out or log).open("wb" if out else "ab") as told,
            ):
                self._child = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "rondel.pipeline.stage_process",
                        str(theirs),
                        ",".join(map(str, cores)),
                        *words,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=told,
                    stderr=said,
                    pass_fds=[theirs],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        code = self._child.poll()
        if code is not None and self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        return code

    def terminate(self) -> None:
        self._child.terminate()

    def wait(self) -> int:
        self._child.wait()
        code = self.poll()
        assert code is not None
        return code


def end_with_pipeline(descriptor: int) -> None:
    """SIGTERM for this process as soon as nobody holds the other end of the pipe."""

    def watch() -> None:
        os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="pipeline", daemon=True).start()


def main(words: list[str]) -> None:
    descriptor, cores, *command = words
    end_with_pipeline(int(descriptor))
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sys.argv = ["rondel", *command]
    runpy.run_module("rondel", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
