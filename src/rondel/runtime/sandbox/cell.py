"""The controller's end of one box: starts it, has commands carried out in it, ends
it. Blocking, each wait with a deadline.
"""

from __future__ import annotations

import fcntl
import functools
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rondel.core.errors import BoxError, SandboxError, UserError
from rondel.core.sandbox_types import BoxFileError, BoxUsage, CommandResult, Limits
from rondel.runtime.sandbox.talk import CommandStreams
from rondel.runtime.sandbox.usage import group_usage, own_folders
from rondel.runtime.sandbox.users import is_real_root, owner_of, random_user_id

HOME = "/box"
OWN = ("/tmp", "/dev/shm")  # memory of each box
BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from rondel.runtime.sandbox.inside.wall import main; main()"
SOURCE = str(Path(__file__).parents[3])
PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
PREFIX = os.path.realpath(sys.base_prefix)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib")
START_SECONDS, END_SECONDS = 30.0, 10.0
ENV = {"HOME": HOME, "TMPDIR": "/tmp", "PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
       "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip


def _refuse_hidden(shown: tuple[str, ...]) -> None:
    """What lies where a box has memory of its own cannot be shown in it."""
    for path in shown:
        if place := next((place for place in (*OWN, HOME) if f"{path}/".startswith(f"{place}/")), ""):
            raise SandboxError(
                f"{path} cannot be shown in a box, which has a {place} of its own: install Python and its packages "
                f"elsewhere than below {place}"
            )


class NamespaceCell:
    """One box behind a wall ("native" or "bubblewrap"). `folder` is of the host and
    becomes its home; else its home is in memory.

    shown    further folders of the host that it may read
    places   further folders that it may write: empty, and its own
    imports  folders that its Python looks for modules in, after its own
    modules  of the standard library: imported once, for all commands
    group    False: no control groups, as on a machine where none can be made
    lock     an open file that is held until nothing of the box is left
    """

    def __init__(
        self,
        limits: Limits,
        wall: str,
        *,
        folder: str | Path | None = None,
        shown: tuple[str, ...] = (),
        places: tuple[str, ...] = (),
        imports: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
        group: bool = True,
        lock: int | None = None,
    ) -> None:
        prefix = () if PREFIX.startswith(SYSTEM) else (PREFIX,)
        shown = (*prefix, *map(os.path.realpath, shown))
        _refuse_hidden(shown)
        self.limits, self.wall, self.folder = limits, wall, Path(folder).resolve() if folder else None
        self.env = ENV | ({"PYTHONPATH": os.pathsep.join(map(os.path.realpath, imports))} if imports else {})
        self._turn = threading.Lock()
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = {
            "wall": wall,
            "control": theirs.fileno(),
            "home": HOME,
            "python": PYTHON,
            "shown": shown,
            "places": list(places),
            "uid": owner_of(self.folder) if self.folder else random_user_id(),
            "folder": str(self.folder or ""),
            "group": group,
            "root": is_real_root(),
            "modules": modules,
            **{
                name: getattr(limits, name)
                for name in ("cpu", "memory", "processes", "disk", "file", "files", "open_files", "network")
            },
        }
        said = os.memfd_create("said")
        env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        with theirs:
            self.process = subprocess.Popen(
                [PYTHON, "-I", "-S", "-c", BOOT, SOURCE, json.dumps(spec)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env, cwd="/", start_new_session=True,
                pass_fds=(theirs.fileno(), *([lock] if lock is not None else [])),
            )  # fmt: skip
        self._control = own
        self._end = weakref.finalize(self, _end_sandbox, own, self.process)
        try:
            hello = self._receive_reply(time.monotonic() + START_SECONDS)
        except SandboxError as error:
            hello = {"silent": str(error)}
        if "ready" not in hello:
            words = (
                hello.get("failed")
                or os.pread(said, 4000, 0).decode(errors="replace").strip().rpartition("\n")[2]
                or hello["silent"]
            )
            self.kill()
            os.close(said)
            raise SandboxError(f"a box behind the wall '{wall}' did not start: {words}")
        os.close(said)
        self.grouped: bool = hello["grouped"]  # the memory of the whole is limited
        self.clean = True  # it is as it was when it was new

    @property
    def alive(self) -> bool:
        return self._end.alive and self.process.poll() is None

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        return self._execute_order({"do": "run", "argv": argv, "env": self.env | (env or {})}, stdin=stdin, wall=wall)

    def call(self, code: str, *, stdin: bytes = b"", wall: float | None = None, prelude: str = "") -> CommandResult:
        """Python text in a copy of the box's waiting interpreter: `run([python, "-c", code])`
        without the start of one. `prelude`: what the code begins with, and is the same in many calls.
        """
        with _memory_file(code) as text:
            more = (text, *([_compile_prelude(prelude)] if prelude else []))
            return self._execute_order({"do": "call", "env": self.env}, stdin=stdin, wall=wall, more=more)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        done = self._execute_order({"do": "write", "path": path, "mode": mode}, stdin=data)
        if not done.ok:
            raise BoxFileError(
                f"cannot write {path!r} in the box: {done.stderr.decode(errors='replace').strip() or done.ended}"
            )

    def read(self, path: str, *, most: int | None = None) -> bytes:
        done = self._execute_order({"do": "read", "path": path}, most=most or self.limits.disk)
        if not done.ok:
            raise BoxFileError(
                f"cannot read {path!r} in the box: {done.stderr.decode(errors='replace').strip() or done.ended}"
            )
        return done.stdout

    def begin(self, code: str, stdin: int, stdout: int, stderr: int, *, prelude: str = "") -> None:
        """As `call`, on files of the caller's; `finish` waits for it."""
        self._turn.acquire()
        try:
            with _memory_file(code) as text:
                self._send_order(
                    {"do": "call", "env": self.env},
                    stdin,
                    stdout,
                    stderr,
                    text,
                    *([_compile_prelude(prelude)] if prelude else []),
                )
        except BaseException:
            self._turn.release()
            raise
        self._began = time.monotonic()

    def finish(self, wall: float) -> CommandResult:
        """After `wall` seconds at most, what was begun has ended, by itself or not."""
        try:
            talk = CommandStreams(self._control, -1, {}, b"", 0)
            answer, limit = talk.until_done(time.monotonic() + wall)
            return self._command_result(answer, limit, b"", b"", self._began)
        finally:
            self._turn.release()

    def usage(self) -> BoxUsage:
        """Of the whole box, where control groups can be made."""
        return group_usage(f"rondel-{self.process.pid}", own_folders()) if self.grouped and self.alive else BoxUsage()

    def interrupt(self) -> None:
        """From another thread: whoever waits for a command of this box gets a SandboxError."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Ends the box and every process in it; returns when they are gone."""
        self._end()
        self.process.wait(2 * END_SECONDS)  # another thread may be at it

    # -- one command -----------------------------------------------------------------------------

    def _execute_order(
        self,
        order: dict[str, Any],
        *,
        stdin: bytes = b"",
        wall: float | None = None,
        most: int = 0,
        more: tuple[int, ...] = (),
    ) -> CommandResult:
        with self._turn:
            began = time.monotonic()
            into, out, err = os.pipe(), os.pipe(), os.pipe()
            try:
                self._send_order(order, into[0], out[1], err[1], *more)
            except BaseException:
                for fd in (into[1], out[0], err[0]):
                    os.close(fd)
                raise
            finally:
                for fd in (into[0], out[1], err[1]):
                    os.close(fd)
            talk = CommandStreams(
                self._control, into[1], {out[0]: bytearray(), err[0]: bytearray()}, stdin, most or self.limits.output
            )
            answer, limit = talk.until_done(began + (wall or self.limits.wall), self._too_much if self.folder else None)
            return self._command_result(
                answer, limit, talk.captured_output(out[0]), talk.captured_output(err[0]), began
            )

    def _command_result(
        self, answer: dict[str, Any] | None, limit: str, stdout: bytes, stderr: bytes, began: float
    ) -> CommandResult:
        if answer is None:
            self.kill()
            raise BoxError(
                "the box broke down" if not limit else f"the box did not end a command over its {limit} limit"
            )
        if answer.get("broken"):
            self.kill()
            raise SandboxError(f"a box behind the wall '{self.wall}' could not begin a command: {answer['broken']}")
        self.clean = not answer["left"]
        number = answer["signal"]
        if not limit and answer["oom"]:
            limit = "memory"
        elif not limit and (
            number == signal.SIGXCPU or (number == signal.SIGKILL and answer["cpu"] >= self.limits.cpu)
        ):
            limit = "cpu"
        elif not limit and number == signal.SIGXFSZ:
            limit = "file"
        return CommandResult(answer["exit"], number, stdout, stderr, limit, time.monotonic() - began)

    def _send_order(self, order: dict[str, Any], *files: int) -> None:
        message = json.dumps(order).encode()
        if len(message) > 1 << 17:
            raise UserError(f"a command of {len(message)} bytes; a box takes {1 << 17}: write a file, or use stdin")
        try:
            socket.send_fds(self._control, [message], list(files))
        except OSError as error:
            raise BoxError(f"the box has ended: {error}") from error

    def _receive_reply(self, deadline: float) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise SandboxError("it said nothing in time")
        try:
            message = self._control.recv(1 << 18)
        except ConnectionResetError:
            message = b""
        if not message:
            raise SandboxError("it ended")
        return json.loads(message)

    def _too_much(self) -> bool:
        assert self.folder
        size, count = folder_usage(self.folder)
        return size > self.limits.disk or count > self.limits.files


@contextmanager
def _memory_file(code: str) -> Iterator[int]:
    """The text as an open file in memory."""
    held = os.memfd_create("code")
    try:
        with open(held, "wb", closefd=False) as file:
            file.write(code.encode(errors="replace"))
        os.lseek(held, 0, os.SEEK_SET)
        yield held
    finally:
        os.close(held)


@functools.cache
def _compile_prelude(prelude: str) -> int:
    """The text compiled, as an open file in memory that nobody can change. A box has this interpreter."""
    held = os.memfd_create("prelude", os.MFD_ALLOW_SEALING)
    os.write(held, marshal.dumps(compile(prelude, "<code>", "exec")))
    fcntl.fcntl(
        held, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )
    return held


def folder_usage(folder: Path) -> tuple[int, int]:
    """(bytes on the disk, files and folders). What vanishes meanwhile does not count; a hole costs nothing."""
    size = count = 0
    folders = [os.fspath(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                count += 1
                with suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return size, count


def _end_sandbox(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
