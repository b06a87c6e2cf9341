"""A box whose commands are logged in order, so that a session that was cut off goes on and runs none of them again.

folder/log.jsonl   {"n", "begin", "idempotent"} before a command runs, {"n", "ran"} before its result
                   is seen, both flushed to the disk
folder/box/        the box's home
folder/lock        held while anything of the session lives

reopened, the same commands in the same order are answered from the log; the first that is
not there runs. One that was begun and has no result runs again only if it was declared
idempotent; else nobody knows what it did,
and that is what the caller is told.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rondel.core.errors import SandboxError, UnknownOutcome, UserError
from rondel.core.sandbox_types import CommandResult, Limits
from rondel.runtime.sandbox.box import Box, Sandbox


class CommandLog:
    """Rows of one session. A row that the end of a process cut in half never happened."""

    def __init__(self, path: Path) -> None:
        self.begun: dict[int, dict[str, Any]] = {}
        self.ran: dict[int, dict[str, Any]] = {}
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                row = json.loads(line)
                (self.begun if "begin" in row else self.ran)[row["n"]] = row
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.fd, whole)
        os.lseek(self.fd, whole, os.SEEK_SET)

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        while line:
            line = line[os.write(self.fd, line) :]
        os.fsync(self.fd)


class SandboxSession:
    """`run` and `write` as of a Box; each has the next number of the log. Made by `opened`."""

    def __init__(self, box: Box, log: CommandLog) -> None:
        self.box, self.log, self.next = box, log, 0
        self.replayed = 0  # commands that were answered from the log

    async def run(
        self,
        argv: list[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        env: dict[str, str] | None = None,
        idempotent: bool = False,
    ) -> CommandResult:
        what = {"run": argv, "stdin": blake2b(stdin, digest_size=16).hexdigest(), "env": env or {}}
        return await self._run_once(what, lambda: self.box.run(argv, stdin=stdin, timeout=timeout, env=env), idempotent)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """A whole file: doing it twice is doing it once."""
        what = {"write": path, "data": blake2b(data, digest_size=16).hexdigest(), "mode": mode}

        async def write_file() -> CommandResult:
            await self.box.write(path, data, mode=mode)
            return CommandResult(0, 0, b"", b"")

        await self._run_once(what, write_file, True)

    async def read(self, path: str) -> bytes:
        """As it is now; not logged."""
        return await self.box.read(path)

    async def _run_once(self, what: dict[str, Any], do: Any, idempotent: bool) -> CommandResult:
        n, self.next = self.next, self.next + 1
        if (before := self.log.begun.get(n)) is not None:
            if before["begin"] != what:
                raise UserError(
                    f"command {n} of the session was {before['begin']}, and is now {what}: only the same session can "
                    "be continued"
                )
            if (row := self.log.ran.get(n)) is not None:
                self.replayed += 1
                return _decode_result(row["ran"], n)
            if not idempotent:
                self._log_result(n, None)
                raise _unknown_outcome(n, what)
        else:
            self.log.write({"n": n, "begin": what, "idempotent": idempotent})
        ran = await do()
        self._log_result(n, ran)
        return ran

    def _log_result(self, n: int, ran: CommandResult | None) -> None:
        self.log.write({"n": n, "ran": None if ran is None else _encode_result(ran)})


@asynccontextmanager
async def open_session(
    sandbox: Sandbox, folder: str | Path, limits: Limits | None = None, *, resume: bool = False, patience: float = 20.0
) -> AsyncIterator[SandboxSession]:
    """A session in `folder`: a new one, or with `resume` the one that is there."""
    folder = Path(folder)
    if (folder / "log.jsonl").exists() and not resume:
        raise UserError(f"{folder} holds a session; resume=True continues it, or name another folder")
    # the box may open its own folder to all, but not the way to it
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "box").mkdir(exist_ok=True, mode=0o700)
    with _exclusive_lock(folder / "lock", patience) as lock:
        log = CommandLog(folder / "log.jsonl")
        try:
            async with sandbox.open(limits or Limits(), folder=folder / "box", lock=lock) as box:
                yield SandboxSession(box, log)
        finally:
            os.close(log.fd)


@contextmanager
def _exclusive_lock(path: Path, patience: float) -> Any:
    """The keeper of a box holds it too: it is free when nothing of a killed session runs any more."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise SandboxError(
                        f"{path.parent} is in use: another session or its box holds {path} since {patience:g} s"
                    ) from None
                time.sleep(0.02)
        yield fd
    finally:
        os.close(fd)


def _unknown_outcome(n: int, what: dict[str, Any]) -> UnknownOutcome:
    return UnknownOutcome(
        f"command {n} ({json.dumps(what)[:200]}) was begun before the session was cut off, and its outcome is unknown; "
        "look at its effect, or declare it idempotent if it may be done twice"
    )


def _encode_result(ran: CommandResult) -> dict[str, Any]:
    streams = {name: base64.b64encode(getattr(ran, name)).decode() for name in ("stdout", "stderr")}
    return {"exit": ran.exit, "signal": ran.signal, "limit": ran.limit, "seconds": round(ran.seconds, 6), **streams}


def _decode_result(row: dict[str, Any] | None, n: int) -> CommandResult:
    if row is None:
        raise _unknown_outcome(n, {})
    return CommandResult(**{**row, **{name: base64.b64decode(row[name]) for name in ("stdout", "stderr")}})
