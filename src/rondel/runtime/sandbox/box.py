"""One door to all substrates.

    sandbox = Sandbox()                                   # or Sandbox("container", image="python:3.11-slim")
    async with sandbox.open(Limits(wall=5)) as box:
        ran = await box.run(["python3", "-c", code], stdin=b"...", timeout=2)
    ran.exit, ran.stdout, ran.limit

| substrate  | a box is                                          | needs |
| process    | a process tree behind namespaces or bubblewrap    | Linux |
| namespaces, bubblewrap | the same behind that wall and no other | Linux; bwrap |
| container  | a container of an image                           | docker, podman, crun or runc |
| gvisor     | a container whose kernel is gVisor's              | runsc |
| microvm    | a virtual machine of Firecracker                  | firecracker, /dev/kvm, a kernel, a root image with an agent |
| vm         | a virtual machine of QEMU                         | qemu-system-*, a kernel, a root image with an agent |
| http       | a box of a service                                | its key |
A recipe names one with its settings (recipe.py). Boxes that wait with an interpreter started: pool.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from rondel.core.errors import SandboxError
from rondel.core.registry import one_of
from rondel.core.sandbox_types import CommandResult, Limits
from rondel.runtime.sandbox.cell import NamespaceCell
from rondel.runtime.sandbox.container import RUNTIMES, find_container_tool, make_engine_container
from rondel.runtime.sandbox.machine import make_machine, make_microvm
from rondel.runtime.sandbox.oci_runtime import make_gvisor, make_oci_container
from rondel.runtime.sandbox.probe import find_isolation
from rondel.runtime.sandbox.remote_box import make_remote_box
from rondel.runtime.sandbox.snapshot import box_copy
from rondel.runtime.sandbox.warm_pool import WaitingBoxes

STANDARD = Limits()


def make_process_cell(
    limits: Limits, *, folder: str | Path | None = None, wall: str = "auto", lock: int | None = None, **more: Any
) -> NamespaceCell:
    """Behind the strongest wall of this machine, or none: a SandboxError."""
    return NamespaceCell(limits, find_isolation(wall).wall, folder=folder, lock=lock, **more)


def make_container(limits: Limits, *, image: str = "python:3.11-slim", tool: str = "auto", **more: Any) -> Any:
    """By the runtime alone for a folder with an image; by an engine for the name of one."""
    found = find_container_tool(image, tool)
    make = make_oci_container if Path(found).name in RUNTIMES else make_engine_container
    return make(found, limits, image=image, **more)


SUBSTRATES: dict[str, Callable[..., Any]] = {
    "process": make_process_cell,
    "namespaces": partial(make_process_cell, wall="native"),
    "bubblewrap": partial(make_process_cell, wall="bubblewrap"),
    "container": make_container,
    "gvisor": make_gvisor,
    "microvm": make_microvm,
    "vm": make_machine,
    "http": make_remote_box,
}
MACHINES = ("microvm", "vm", "http")  # whose boxes are machines of their own
SHOWS_HOST = ("process", "namespaces", "bubblewrap")  # whose boxes see the interpreter and the packages of this machine


class Sandbox:
    """Makes boxes of one substrate. `cell` is a box with blocking verbs; `open` is one for a coroutine.

    limits  of a recipe, that replace those of the caller: {"memory": 1 << 30}
    warm    how many boxes wait started
    """

    def __init__(
        self, kind: str = "process", *, limits: dict[str, Any] | None = None, warm: int = 0, **settings: Any
    ) -> None:
        one_of("sandbox kind", kind, SUBSTRATES)
        self.kind, self.settings, self.limits = kind, settings, limits or {}
        self._waiting = WaitingBoxes(self._start, warm) if warm else None

    @property
    def shows_host(self) -> bool:
        """Whether what is installed on this machine can be shown in a box; else it has what its image has."""
        return self.kind in SHOWS_HOST

    @property
    def is_machine(self) -> bool:
        """Whether a box has memory of its own, and sees no folder of this machine."""
        return self.kind in MACHINES

    def cell(self, limits: Limits = STANDARD, **settings: Any) -> Any:
        limits = replace(limits, **self.limits) if self.limits else limits
        return self._waiting.take(limits, settings) if self._waiting else self._start(limits, settings)

    def _start(self, limits: Limits, settings: dict[str, Any]) -> Any:
        """`base`: a folder whose copy the box has as its home."""
        base = settings.get("base")
        if base is None:
            return SUBSTRATES[self.kind](limits, **self.settings, **settings)
        if self.is_machine:
            raise SandboxError(
                f"a box of kind '{self.kind}' sees no folder of this machine, and cannot begin from {base}"
            )
        copy = box_copy(base)
        try:
            rest = {name: value for name, value in settings.items() if name != "base"}
            cell = SUBSTRATES[self.kind](limits, **self.settings, **rest, folder=copy)
        except BaseException:
            rmtree(copy, ignore_errors=True)
            raise
        cell.kill = partial(_end_with_copy, cell.kill, copy)
        return cell

    @asynccontextmanager
    async def open(self, limits: Limits = STANDARD, **settings: Any) -> AsyncIterator[Box]:
        """Whatever happens inside, also that it is cancelled: afterwards nothing of the box is left."""
        opening = asyncio.ensure_future(on_a_thread(self.cell, limits, **settings))
        try:
            cell = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: done.cancelled() or done.exception() or done.result().kill())
            raise
        try:
            yield Box(cell)
        finally:
            await asyncio.shield(on_a_thread(cell.kill))


def _end_with_copy(kill: Callable[[], None], copy: Path) -> None:
    kill()
    rmtree(copy, ignore_errors=True)


class Box:
    """One box, for a coroutine. Each command has a thread of its own while it runs: a slow one delays nobody."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    async def run(
        self, argv: list[str], *, stdin: bytes = b"", timeout: float | None = None, env: dict[str, str] | None = None
    ) -> CommandResult:
        return await self._run_in_thread(self.cell.run, argv, stdin=stdin, wall=timeout, env=env)

    async def call(self, code: str, *, stdin: bytes = b"", timeout: float | None = None) -> CommandResult:
        return await self._run_in_thread(self.cell.call, code, stdin=stdin, wall=timeout)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._run_in_thread(self.cell.write, path, data, mode=mode)

    async def read(self, path: str) -> bytes:
        return await self._run_in_thread(self.cell.read, path)

    async def _run_in_thread(self, verb: Callable[..., Any], *what: Any, **how: Any) -> Any:
        try:
            return await on_a_thread(verb, *what, **how)
        except asyncio.CancelledError:
            self.cell.interrupt()
            raise


async def on_a_thread(verb: Callable[..., Any], *what: Any, **how: Any) -> Any:
    """Of its own: those of the loop's executor are few, and one that waits for a command would
    keep the others waiting.
    """
    done: Future[Any] = Future()

    def run_verb() -> None:
        try:
            done.set_result(verb(*what, **how))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run_verb, name="sandbox", daemon=True).start()
    waits = asyncio.wrap_future(done)
    # nobody may be there any more to hear it
    waits.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(waits)
