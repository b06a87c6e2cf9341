"""Workers of pytest-xdist forked from the clean server of `kits.runs`: each begins with what it would import, some 10 s of a
core, and with a fork server of its own for the workers of runs, some 4 s.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import types
from multiprocessing import process as processes
from multiprocessing import util
from multiprocessing.reduction import DupFd
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from kits.nursery import fork_nursery, name_process
from kits.runs import context


class ForkedIO(Popen2IO):
    """What execnet asks of a worker's process and of the pipes to it."""

    remoteaddress: str

    def __init__(self, execmodel: ExecModel) -> None:
        stdin, written = os.pipe()
        read, stdout = os.pipe()
        ends = [DupFd(stdin), DupFd(stdout), DupFd(2)]
        self.process = context.Process(target=_become_worker, args=(ends, dict(os.environ)))
        self.process.start()
        os.close(stdin)
        os.close(stdout)
        super().__init__(os.fdopen(written, "wb"), os.fdopen(read, "rb"), execmodel=execmodel)

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def fork_workers() -> None:
    """From now on execnet forks the workers that it would start with an interpreter of their own."""
    ordinary = gateway_io.create_io
    gateway_io.create_io = lambda spec, execmodel: (
        ForkedIO(execmodel) if spec.popen and not spec.python else ordinary(spec, execmodel)
    )


def _become_worker(ends: list[Any], environment: dict[str, str]) -> None:
    """The forked process as a fresh interpreter would be that execnet has started."""
    for own, end in enumerate(ends):
        descriptor = end.detach()
        os.dup2(descriptor, own)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ignores the first one
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    processes._parent_process = None
    multiprocessing.set_start_method(None, force=True)
    name_process(sys.executable, "-u", "-c", gateway_io.popen_bootstrapline)
    fork_nursery()
    for name in [name for name in sys.modules if name.partition(".")[0] == "kits"]:
        del sys.modules[name]  # pytest rewrites their assertions
    sys.argv[:] = ["-c"]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), program.__dict__)
    threading._shutdown()  # as an interpreter ends: threads, then processes that serve it, then what wanted to be called
    util._exit_function()
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
