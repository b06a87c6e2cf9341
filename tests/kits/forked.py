"""Commands of Rondel in processes of their own that begin with everything imported: they are forked from the
clean server of `kits.runs`, where a fresh interpreter would take five seconds of a core to import torch and transformers.

What is under test when an interpreter starts (its signals, its imports, its first words) is started with `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from kits.nursery import fork_nursery
from kits.runs import context

Output = int | IO[Any] | None  # PIPE, STDOUT for stderr, an open file, or None: as in subprocess


class Forked:
    """The part of `subprocess.Popen` that tests ask of a command: `rondel *words`, or a script and its words."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        script: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Output = None,
        stderr: Output = None,
        start_new_session: bool = False,
    ) -> None:
        self.stdout, out = _ends(stdout, 1)
        self.stderr, err = (None, out) if stderr is subprocess.STDOUT else _ends(stderr, 2)
        ends = [DupFd(out), DupFd(err)]
        given = dict(os.environ if env is None else env), [str(w) for w in words], script, os.getcwd()
        self._process = context.Process(target=_command, args=(ends, start_new_session, *given))
        self._process.start()
        for piped, end in ((self.stdout, out), (self.stderr, err)):
            if piped is not None:
                os.close(end)
        self.args, self.pid = words, self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to the pipes until it ended; one that does not end in time is killed first."""
        said: dict[str, str] = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            if (pipe := getattr(self, name)) is not None:
                with pipe:
                    said[name] = pipe.read()

        readers = [threading.Thread(target=read, args=(name,)) for name in said]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join(timeout=10)
        return said["stdout"], said["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def run(
    words: Sequence[str | Path],
    *,
    script: Path | None = None,
    timeout: float = 200,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`rondel *words`, or `script *words`, until it ends. -> exit code, stdout, stderr."""
    process = Forked(words, script=script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(list(map(str, words)), process.wait(), out, err)


def _ends(wanted: Output, own: int) -> tuple[IO[str] | None, int]:
    """(what this process reads or None, what the child writes to)"""
    if wanted == subprocess.PIPE:
        ours, theirs = os.pipe()
        return os.fdopen(ours, encoding="utf-8"), theirs
    if wanted == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    return None, own if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno()


def _command(
    ends: list[Any], new_session: bool, env: dict[str, str], words: list[str], script: Path | None, folder: str
) -> None:
    """The forked process as a fresh interpreter would be."""
    for own, end in enumerate(ends, start=1):
        descriptor = end.detach()
        os.dup2(descriptor, own)
        os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ignores the first one
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv[:] = [str(script or "rondel"), *words]
    fork_nursery()
    code: Any = 0
    try:
        if script is None:
            from rondel.cli import main

            main(words)
        else:
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # as an interpreter ends: threads, then what wanted to be called
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)
