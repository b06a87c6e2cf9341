"""Functions: boxes that wait with an interpreter started, for snippets of Python answered in milliseconds."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any

from rondel.core.errors import SandboxError, UserError
from rondel.core.sandbox_types import CommandResult, Limits
from rondel.runtime.sandbox.box import Sandbox, on_a_thread


class Functions:
    """`Functions(Sandbox(), size=2).call("print(6 * 7)")` -> Ran(0, 0, b"42\\n", ...).

    A snippet runs in a copy of the box's interpreter and everything it started ends with it.
    A box is used again only if it is as it was when it was new; else it is thrown away
    and another is started beside the work.
    """

    def __init__(
        self, sandbox: Sandbox, limits: Limits | None = None, *, size: int = 1, patience: float = 60.0
    ) -> None:
        if size < 1:
            raise UserError(f"a pool of {size} boxes; at least one is needed")
        self.sandbox, self.limits, self.patience = sandbox, limits or Limits(), patience
        self._idle: queue.Queue[Any] = queue.Queue()  # cells, or the error of one that could not be started
        self._all: set[Any] = set()
        self._end = weakref.finalize(self, _end_cells, self._all)
        for _ in range(size):
            self._start_cell()

    def call(self, code: str, *, stdin: bytes = b"", wall: float | None = None) -> CommandResult:
        try:
            cell = self._idle.get(timeout=self.patience)
        except queue.Empty:
            raise SandboxError(f"no box of the pool became free within {self.patience:g} s; make it larger") from None
        if isinstance(cell, SandboxError):
            threading.Thread(target=self._start_cell, daemon=True).start()  # the next caller gets another trial
            raise cell
        try:
            return cell.call(code, stdin=stdin, wall=wall)
        finally:
            if cell.alive and cell.clean and self._end.alive:
                self._idle.put(cell)
            else:
                threading.Thread(target=self._replace_cell, args=(cell,), daemon=True).start()

    async def acall(self, code: str, *, stdin: bytes = b"", timeout: float | None = None) -> CommandResult:
        return await on_a_thread(self.call, code, stdin=stdin, wall=timeout)

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Functions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_cell(self) -> None:
        try:
            cell = self.sandbox.cell(self.limits)
        except SandboxError as error:
            self._idle.put(error)
            return
        self._all.add(cell)
        if not self._end.alive:  # closed meanwhile
            cell.kill()
        self._idle.put(cell)

    def _replace_cell(self, cell: Any) -> None:
        self._all.discard(cell)
        cell.kill()
        if self._end.alive:
            self._start_cell()


def _end_cells(cells: set[Any]) -> None:
    for cell in tuple(cells):
        cell.interrupt()
    for cell in tuple(cells):
        cell.kill()
