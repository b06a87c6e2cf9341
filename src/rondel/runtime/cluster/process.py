"""Workers as processes of this machine: an object lives in a child, and `await
worker.verb(...)` is the same call as in process.

    controller   ask ──> thread "send" ──┐ socket pair ┌──> thread "hear" ──> event loop: one task a call
                 future <── thread "hear" ┘ (frames.py) └── thread "send" <── result, error, event, pulse

The pair is unnamed and belongs to these two processes, so nothing crosses a trust
boundary. A child ends with its controller (law 14); one that ends by itself, or whose
pulse stops or tells of no progress, fails
every call that waits for it, by name (law 10).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from rondel.core.clocks import running_time
from rondel.core.errors import SilentError
from rondel.core.given_objects import pack_given
from rondel.runtime.cluster import forkserver, frames
from rondel.runtime.cluster.process_activity import ProcessActivity
from rondel.runtime.cluster.worker import PULSE, STILL, RemoteWorker
from rondel.runtime.stacks import SIGNAL
from rondel.system.files import guard_write, make_folder

GRACE = 5.0  # that one may take to end when it is asked to
DUMP = 5.0  # seconds that one may take to write its stacks
QUIET = 0.25  # idle seconds without another line of them after which they are whole: each is many writes
LINES = 50  # of a dead worker's output that its error shows


class ProcessCluster:
    """`cluster.spawn("engine-0", engine_of, job)` starts a child that builds `engine_of(job)` and serves its methods.

    logs      a folder for what each child prints, or None
    patience  seconds without progress in what it was asked for after which a worker counts as
              stuck (progress.py says what that is)
    """

    def __init__(self, logs: Path | None = None, *, patience: float = 60.0) -> None:
        self.logs, self.patience = logs, patience
        self.workers: list[ProcessWorker] = []

    def spawn(
        self, name: str, make: Callable[..., Any], *args: Any, cores: Sequence[int] = (), tells: bool = True
    ) -> ProcessWorker:
        """`cores`: the only ones the child may use. `tells`: whether its events are heard here."""
        log = None
        if self.logs is not None:
            make_folder(self.logs)
            log = self.logs / f"{name}.log"
        worker = ProcessWorker(
            name, make, args, cores=tuple(cores), tells=tells, log=log, patience=self.patience, all_dump=self.dump
        )
        self.workers.append(worker)
        return worker

    def pids(self) -> dict[str, int]:
        """By name, the newest of a name."""
        return {worker._name: worker.pid for worker in self.workers}

    def dump(self) -> None:
        """Each child writes its stacks into its log."""
        for worker in self.workers:
            worker.dump()

    def close(self) -> None:
        for worker in self.workers:
            worker.dismiss()
        for worker in self.workers:
            worker.close()


class ProcessWorker(RemoteWorker):
    """A child of this process behind a pair of sockets."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        cores: tuple[int, ...],
        tells: bool,
        log: Path | None,
        patience: float,
        all_dump: Callable[[], None],
    ) -> None:
        super().__init__(name, patience)
        self._log, self._all_dump = log, all_dump
        ours, theirs = socket.socketpair()
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        }
        with theirs, _open_log(log or Path(os.devnull)) as out:
            self._process = forkserver.fork_from_server(
                make, theirs.fileno(), out.fileno(), environment
            ) or subprocess.Popen(
                [sys.executable, "-m", "rondel.runtime.cluster.worker_main", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._pipe = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[frames.Frame] = queue.SimpleQueue()
        self._sign: Any = None  # of what advances in the child, as it last said
        self._heard = self._spoke = running_time()  # progress; anything
        self._activity: ProcessActivity | None = None  # while it is built
        self._speaks = False  # one that has not spoken yet does not know the signal
        self._end = weakref.finalize(self, _end_process, self._process)
        self._outbox.put(frames.pack((name, cores, tells, pack_given())))
        self._made = self.ask("", make, args)
        for work in (self._write, self._read, self._watch):
            threading.Thread(target=work, name=f"{name}-{work.__name__[1:]}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def host(self) -> str:
        """By which other workers reach it."""
        return "127.0.0.1"

    def dismiss(self) -> None:
        """Ask the child to end, and wait for nothing."""
        self._outbox.put(frames.pack((0, None)))
        self._mark_lost(f"worker {self._name} was closed")

    def close(self) -> None:
        """End the child: asked first, then killed."""
        self.dismiss()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end.detach()

    # -- calls -----------------------------------------------------------------------------------

    @staticmethod
    def pack_arguments(args: tuple[Any, ...]) -> tuple[frames.PackedArguments]:
        """The same arguments for calls to several workers, pickled once."""
        return (frames.pack_arguments(args),)

    def _send_call(self, number: int, verb: str, args: tuple[Any, ...], how: dict[str, Any]) -> None:
        self._outbox.put(frames.pack_call(number, verb, args, how))

    def _cancel_call(self, number: int) -> None:
        self._outbox.put(frames.pack((number, None)))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the child is gone: `_read` says so
            while True:
                frames.send_frame(self._pipe, self._outbox.get())

    def _read(self) -> None:
        try:
            while True:
                self._unpack_message(frames.receive_bytes(self._pipe))
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._mark_lost(f"worker {self._name} (process {self.pid}) {how}", words=self._last_words)

    def _unpack_message(self, received: frames.Received) -> None:
        """What is of a class that only the child has cannot be read here, and whose answer it was is not known."""
        try:
            message = frames.unpack(received)
        except Exception as error:
            why = f"answered what cannot be read here: {type(error).__name__}: {error}"
            self._mark_lost(f"worker {self._name} (process {self.pid}) {why}")
            self._process.kill()
        else:
            self._take_message(*message)

    def _take_message(self, number: int, kind: str, value: Any) -> None:
        """Nothing of it stays here while the next one is waited for: it may be an answer of a million tokens."""
        self._speaks, self._spoke = True, running_time()
        if kind != "pulse" or value != self._sign or not self._pending_verbs():
            self._heard = self._spoke
        self._sign = value if kind == "pulse" else self._sign
        if kind == "event":
            self._forward_event(value)
        elif kind == "broken":
            self._mark_lost(str(value))
            self._process.kill()
        elif number:
            self._resolve_call(number, kind, value)

    # -- life and death --------------------------------------------------------------------------

    def _watch(self) -> None:
        """A worker that stands still says so through its silence, or by saying the same again and again."""
        every = min(PULSE, self._patience / 4)
        while not self._over:
            time.sleep(every)
            if (how := self._find_silence()) and (waiting := self._pending_verbs()):
                self._mark_lost(
                    f"worker {self._name} ({self._describe_process()}) {how}, asked for: {waiting}",
                    SilentError,
                    self._dump_stacks,
                )
                self._process.kill()

    def _find_silence(self) -> str:
        """In what way it has been silent for too long; nothing if it has not.

        The limit of one that is built or loads is long, for imports and slow disks. That is for one that gives a pulse,
        or of which the kernel knows that it does something: an import may hold the interpreter, and the pulse with it.
        """
        now = running_time()
        if (silent := now - self._heard) > (limit := self._silence_limit):
            return f"gives no sign of life since {silent:.0f} s (limit {limit:g} s)"
        if not self._is_starting or not self._is_born:
            return ""
        activity = self._activity = self._activity or ProcessActivity(self.pid)
        activity.look()
        silent = min(activity.idle_seconds, now - self._spoke)
        if silent > (limit := self._patience) and activity.is_stopped:
            return f"is stopped by a signal or a debugger since {silent:.0f} s (limit {limit:g} s)"
        if silent > (limit := max(self._patience, STILL)):
            return f"neither answers nor computes nor reads since {silent:.0f} s (limit {limit:g} s)"
        return ""

    @property
    def _is_born(self) -> bool:
        return not isinstance(self._process, forkserver.ForkedProcess) or self._process.born.done()

    def _describe_process(self) -> str:
        try:
            return f"process {self.pid}"
        except TimeoutError:
            return "its process was never started"

    def dump(self) -> None:
        """Its stacks, into its log; one that was stopped goes on, or it could not."""
        if self._speaks and self._process.poll() is None:
            self._process.send_signal(SIGNAL)
            self._process.send_signal(signal.SIGCONT)

    def _dump_stacks(self) -> str:
        """What it does, and what the others wait for meanwhile: into the logs, before it is killed."""
        size, deadline = self._log_size(), time.monotonic() + DUMP
        if not self._speaks:
            self._all_dump()
            time.sleep(QUIET)  # for the others': of its own none will come
            return self._last_words()
        activity = ProcessActivity(self.pid)
        activity.look()
        was_stopped = activity.is_stopped  # it goes on now, and not only with its stacks
        self._all_dump()
        seen, since = size, time.monotonic()
        while time.monotonic() < deadline and (seen == size or time.monotonic() - since < QUIET):
            time.sleep(0.02)
            activity.look()
            if (now := self._log_size()) != seen or (activity.is_running and not was_stopped):
                seen, since = now, time.monotonic()
        return self._last_words()

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log and self._log.is_file() else 0

    def _last_words(self) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-LINES:]
        return f"; the last lines of {self._log}:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def _open_log(log: Path) -> IO[bytes]:
    with guard_write(log, doing="opening"):
        return log.open("ab")


def _end_process(process: subprocess.Popen | forkserver.ForkedProcess) -> None:
    process.kill()
    process.wait()
