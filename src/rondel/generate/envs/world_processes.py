"""Worlds in processes beside this one: as many verbs are computed at once as there are processes.

episodes ── reset, take ──> WorldProcess ── pickled over a socket pair ──> serve_worlds: its worlds, one verb after the other

A process is one of this program's own, which runs the worlds of the recipe as this process would;
its answers are trusted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rondel.core.errors import EnvError
from rondel.generate.envs.worlds import Taken, WorldSource, WorldSpaces

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from multiprocessing.connection import Connection; "
    "from rondel.generate.envs.world_process import serve_worlds; serve_worlds(Connection(int(sys.argv[2])))"
)
ASKED = 16  # verbs that one process is asked for at once: the others wait here, so that its socket is never full
PATIENCE = 5.0  # seconds in which a process ends that was asked to


class WorldProcesses:
    """`WorldProcesses(4)`. They start with their first world, and end with `close`."""

    def __init__(self, count: int) -> None:
        self.count, self.processes = count, list[WorldProcess]()

    async def open(self, source: WorldSource) -> RemoteWorld:
        """A world in the process that has the fewest; one that has died is replaced."""
        self.processes = [process for process in self.processes if process.ended is None]
        if len(self.processes) < self.count:
            self.processes.append(WorldProcess())
        process = min(self.processes, key=lambda one: one.worlds)
        number = next(process.numbers)
        process.worlds += 1
        return RemoteWorld(process, number, await process.ask("open", number, source))

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.processes = []


class WorldProcess:
    """The end here of one of them.

    ended   why it answers no more; None while it does
    worlds  how many it has
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's affair
            )
        self.connection = Connection(ours.detach())
        self.ended: EnvError | None = None
        self.worlds, self.numbers, self.room = 0, itertools.count(), asyncio.Semaphore(ASKED)
        self.waiting: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, verb: str, world: int, *given: Any) -> Any:
        """What the world answers. EnvError where it raises, or where the process has ended."""
        async with self.room:
            if self.ended is not None:
                raise EnvError(str(self.ended))
            loop = asyncio.get_running_loop()
            number, answer = next(self.numbers), loop.create_future()
            if not self.waiting:
                loop.add_reader(self.connection.fileno(), self._read_answers)
            self.waiting[number] = answer
            try:
                self.connection.send((number, verb, world, given))
            except OSError:
                self._end()
            return await answer

    def _read_answers(self) -> None:
        try:
            while self.connection.poll():
                number, found, error = self.connection.recv()
                self._settle(number, found, error)
        except (EOFError, OSError):
            self._end()

    def _settle(self, number: int, found: Any, error: Exception | None) -> None:
        answer = self.waiting.pop(number)
        if not answer.done():
            answer.set_result(found) if error is None else answer.set_exception(error)
        if not self.waiting:
            answer.get_loop().remove_reader(self.connection.fileno())

    def _end(self) -> None:
        """Its episodes are told why."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        code = self.process.returncode
        how = "ended" if code is None else f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.ended = EnvError(
            f"the process {self.process.pid} that stepped worlds has ended, {how}, and its episodes with it; later "
            "ones get another process. If this goes on, the machine may be out of memory, or a world may end its "
            "process: set task.env.processes lower, or 0 to see what the world says"
        )
        for number in list(self.waiting):
            self._settle(number, None, EnvError(str(self.ended)))

    def tell_close(self, world: int) -> None:
        """The world is not played again; nobody waits for that."""
        self.worlds -= 1
        if self.ended is None:
            task = asyncio.ensure_future(self.ask("close", world))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        """It ends when its socket does, or is ended."""
        self.ended = self.ended or EnvError("the run has ended, and its worlds with it")
        self.connection.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class RemoteWorld:
    """A `HostedWorld` in another process, whose verbs are awaited."""

    process: WorldProcess
    number: int
    spaces: WorldSpaces

    @property
    def is_lost(self) -> bool:
        return self.process.ended is not None

    async def reset(self, seed: int) -> np.ndarray:
        found: np.ndarray = await self.process.ask("reset", self.number, seed)
        return found

    async def take(self, actions: Sequence[np.ndarray], left: int) -> Taken:
        found: Taken = await self.process.ask("take", self.number, np.asarray(actions), left)
        return found

    def close(self) -> None:
        self.process.tell_close(self.number)
