"""What boxes of other tools share: files through commands, and commands through a client program.

A container's first process is a shell that waits for the end of its stdin, a pipe of the controller's: when that ends,
however it ends, the kernel closes the pipe, the first process ends, and with it all others of the container.
"""

from __future__ import annotations

import base64
import os
import select
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rondel.core.errors import SandboxError, UserError
from rondel.core.sandbox_types import BoxFileError, BoxUsage, CommandResult, Limits
from rondel.runtime.sandbox.relay import RelayedProgram

GO_BYTES = 128 << 20  # of memory that a runtime written in Go takes for itself before it becomes the command
HOME = "/box"
ENV = {
    "HOME": HOME, "TMPDIR": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
FIRST = ["sh", "-c", "trap '' CHLD; echo ready; exec cat >/dev/null"]  # orphans are reaped by the kernel
LONGEST_ARGUMENT = 120_000  # bytes: the kernel takes 131,072
START_SECONDS, END_SECONDS = 60.0, 10.0


def python_command(code: str) -> list[str]:
    """The interpreter on a text; a long one is packed, for the kernel has a limit for one argument."""
    if len(code.encode(errors="replace")) >= LONGEST_ARGUMENT:
        packed = base64.b85encode(zlib.compress(code.encode(errors="replace"))).decode()
        code = f"import base64,zlib;exec(compile(zlib.decompress(base64.b85decode({packed!r})),'<code>','exec'))"
        if len(code) >= LONGEST_ARGUMENT:
            raise UserError(f"code of {len(code)} bytes, packed; a box takes {LONGEST_ARGUMENT}: write a file")
    return ["python3", "-c", code]


class ExternalSandbox:
    """One box by another tool. `run` is the substrate's own; files and Python go through it."""

    limits: Limits
    clean = False  # it is never used for somebody else
    alive = True

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        raise NotImplementedError

    def call(self, code: str, *, stdin: bytes = b"", wall: float | None = None, prelude: str = "") -> CommandResult:
        return self.run(python_command(f"{prelude}\n{code}"), stdin=stdin, wall=wall)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        done = self.run(
            ["sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"', "write", path, f"{mode:o}"],
            stdin=data,
        )
        if not done.ok:
            raise BoxFileError(
                f"cannot write {path!r} in the box: {done.stderr.decode(errors='replace').strip() or done.ended}"
            )

    def read(self, path: str) -> bytes:
        done = self.run(["cat", "--", path])
        if not done.ok:
            raise BoxFileError(
                f"cannot read {path!r} in the box: {done.stderr.decode(errors='replace').strip() or done.ended}"
            )
        return done.stdout

    def begin(self, code: str, stdin: int, stdout: int, stderr: int, *, prelude: str = "") -> None:
        self._relayed = RelayedProgram(self, f"{prelude}\n{code}", stdin, stdout, stderr)

    def finish(self, wall: float) -> CommandResult:
        return self._relayed.finish(wall)

    def usage(self) -> BoxUsage:
        """Nobody counts it unless the substrate does."""
        return BoxUsage()

    def interrupt(self) -> None:
        self.kill()

    def kill(self) -> None:
        raise NotImplementedError


class ContainerSandbox(ExternalSandbox):
    """A container in which a client program on this machine carries out commands (`exec_command`)."""

    name: str
    tool: str

    def exec_command(self, argv: list[str], env: dict[str, str]) -> list[str]:
        raise NotImplementedError

    def over_memory(self) -> bool:
        """Whether the kernel has ended something of it for its memory since this was asked last."""
        return False

    def run(
        self, argv: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, wall: float | None = None
    ) -> CommandResult:
        began = time.monotonic()
        stdout, stderr, limit, code = communicate_bounded(
            self.exec_command(argv, env or {}), stdin, began + (wall or self.limits.wall), self.limits.output, self.kill
        )  # `exec` has no way to end what it began: over a limit the container goes, and with it all that runs
        return self._result(code, stdout, stderr, limit, began)

    def begin(self, code: str, stdin: int, stdout: int, stderr: int, *, prelude: str = "") -> None:
        self._began = time.monotonic()
        try:
            self._open = subprocess.Popen(
                self.exec_command(python_command(f"{prelude}\n{code}"), {}),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{self.tool} did not begin a command in {self.name}: {error}") from error

    def finish(self, wall: float) -> CommandResult:
        limit = ""
        try:
            code = self._open.wait(wall)
        except subprocess.TimeoutExpired:
            limit = "wall"
            self.kill()
            self._open.kill()
            code = self._open.wait()
        return self._result(code, b"", b"", limit, self._began)

    def _result(self, code: int, stdout: bytes, stderr: bytes, limit: str, began: float) -> CommandResult:
        number = -code if code < 0 else code - 128 if 128 < code <= 192 else 0  # above: the client failed, or an exit
        limit = limit or ("memory" if number == 9 and self.over_memory() else "cpu" if number == 24 else "")
        return CommandResult(0 if number else code, number, stdout, stderr, limit, time.monotonic() - began)


class KeptProcess:
    """A program outside whose first process in the box ends with `pipe`, and that says "ready" when it runs."""

    def __init__(self, command: list[str], what: str, patience: float = START_SECONDS) -> None:
        there, self.pipe = os.pipe()
        back, ready = os.pipe()
        self.said = os.memfd_create("said")
        try:
            self.process = subprocess.Popen(
                command, stdin=there, stdout=ready, stderr=self.said, start_new_session=True, cwd=tempfile.gettempdir()
            )
        except OSError as error:
            for fd in (there, self.pipe, back, ready, self.said):
                os.close(fd)
            raise SandboxError(f"{what} did not start: {error}") from error
        os.close(there)
        os.close(ready)
        poll = select.poll()
        poll.register(back, select.POLLIN)
        started = bool(poll.poll(patience * 1000)) and os.read(back, 64).startswith(b"ready")
        os.close(back)
        if not started:
            self.end()
            words = os.pread(self.said, 4000, 0).decode(errors="replace").strip()[-300:]
            os.close(self.said)
            raise SandboxError(f"{what} did not start: {words or 'it said nothing in time'}")
        os.close(self.said)

    def end(self, patience: float = END_SECONDS) -> None:
        with suppress(OSError):
            os.close(self.pipe)
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def communicate_bounded(
    command: list[str], stdin: bytes, deadline: float, most: int, kill: Callable[[], None] = lambda: None
) -> tuple[bytes, bytes, str, int]:
    """-> (stdout, stderr, limit, exit code) of a program outside, ended at the deadline or when it says too much:
    `kill` then ends what it began.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    said: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    limits: list[str] = []

    def feed_stdin() -> None:
        assert process.stdin
        with suppress(OSError), process.stdin:
            process.stdin.write(stdin)

    def read_stream(stream: Any) -> None:
        while piece := stream.read1(1 << 16):
            said[stream] += piece[: most - len(said[stream])]
            if len(said[stream]) >= most:
                limits.append("output")
                process.kill()

    threads = [
        threading.Thread(target=feed_stdin, daemon=True),
        *(threading.Thread(target=read_stream, args=(s,), daemon=True) for s in said),
    ]
    for thread in threads:
        thread.start()
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        limits.append("wall")
        process.kill()
        code = process.wait()
    if limits:
        kill()
    for thread in threads[1:]:
        thread.join(1.0)
    return bytes(said[process.stdout]), bytes(said[process.stderr]), limits[0] if limits else "", code
