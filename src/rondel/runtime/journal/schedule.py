"""The schedule of a run: what its recipe does not determine. With it an asynchronous run is done again, bit for bit.

    schedule.jsonl    ["put", 17]     in which order the buffer was used, at which steps groups
                      finished, and which were given up as late ["drew", "9f..", 0, [[3, 21, 4], [4, 29,
                      12]], "group-17"]   a request's key, its
                      continuation, its stints and whose it
                                      was: four tokens under version 3, eight more under version 4 over the
                                      keys and values of both

Which other requests were computed beside one, on which engine and how fast does not matter
where numerics are aligned. So a group that was given up is not begun: nothing of it was
trained, and nothing waits for its requests.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from rondel.core.errors import CheckpointError, LawError, StalledError, UserError, error_boundary
from rondel.core.events import Warned, emit
from rondel.core.schedule_gate import ScheduleGate
from rondel.core.types import Completion, Request, Stint
from rondel.system.files import guard_write
from rondel.text.unicode import read_exact_json, write_json

FILE = "schedule.jsonl"
PATIENCE = 1800.0  # seconds


class OrderedGate(ScheduleGate):
    """A gate at which what happens has an order, written down or followed."""

    keeps_order = True

    def wrap_engine(self, engine: Any) -> Any:
        return ScheduledEngine(engine, self)


class ScheduledEngine:
    """The engine, whose requests are recorded or follow their record. Evaluations are at
    one version whole, and need neither.
    """

    def __init__(self, engine: Any, gate: ScheduleGate) -> None:
        self._engine, self._gate = engine, gate

    async def generate(self, request: Request) -> Completion:
        if request.namespace:
            return await self._engine.generate(request)
        done = await self._engine.generate(replace(request, lines=self._gate.version_spans(request)))
        self._gate.record_completion(request, done)
        return done

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)


class OrderRecorder(OrderedGate):
    """A gate that lets everything pass and writes it down."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        with guard_write(self.path, doing="opening"):
            self._file = self.path.open("w", buffering=1)

    def begin_phase(self) -> None:
        self._write_row("begin", 0)

    def mark_done(self, what: str, number: int) -> None:
        self._write_row(what, number)

    def record_completion(self, request: Request, done: Completion) -> None:
        if not done.tokens:
            return
        if not {*done.versions} <= {
            version for version, *_ in done.stints
        }:  # it was read from the token log of an engine that ended
            self.mark_unreplayable("an engine ended and was started again: what it had computed by then is not known")
        self._write_row("drew", f"{request.key:x}", request.continuation, done.stints, request.id)

    def mark_unreplayable(self, why: str) -> None:
        emit(Warned(f"this run cannot be replayed: {why}"))
        self._write_row("spoiled", why)

    def close(self) -> None:
        self._file.close()

    def _write_row(self, *row: Any) -> None:
        line = write_json(row) + "\n"
        with guard_write(self.path, len(line)):
            self._file.write(line)


class OrderReplayer(OrderedGate):
    """A gate that lets pass what happened, when it happened."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        if not path.is_file():
            raise UserError(
                f"{folder} has no {FILE}: only a run that was trained with --record can be replayed whole. One step: "
                f"--step N"
            )
        with error_boundary(CheckpointError, f"reading {path}"):
            rows = [read_exact_json(line) for line in path.read_text().splitlines()]
        if why := [row[1] for row in rows if row[0] == "spoiled"]:
            raise UserError(f"{folder} cannot be replayed: {why[0]}")
        self._phases: deque[list[tuple[str, int]]] = deque()
        for what, number in ((row[0], row[1]) for row in rows if row[0] != "drew"):
            self._phases.append([]) if what == "begin" else self._phases[-1].append((what, number))
        self._pieces: dict[tuple[int, int], deque[tuple[Stint, ...]]] = defaultdict(deque)
        # version -> (key, continuation, how many of them are left)
        self._due: dict[int, set[tuple[int, int, int]]] = defaultdict(set)
        lost = {f"group-{number}" for what, number in self._phases[-1] if what == "late"} if self._phases else set()
        for _, key, continuation, stints, group in (row for row in rows if row[0] == "drew"):
            if group not in lost:
                self._pieces[int(key, 16), continuation].appendleft(tuple(map(tuple, stints)))
        for (key, continuation), pieces in self._pieces.items():
            for left, stints in enumerate(pieces, 1):
                for version, *_ in stints:
                    self._due[version].add((key, continuation, left))
        self._news = asyncio.Event()

    def begin_phase(self) -> None:
        self._order, self._at = self._phases.popleft(), 0
        self._left = {number: what for what, number in self._order if what in ("put", "drop")}
        self._late = {number for what, number in self._order if what == "late"}

    def may_proceed(self, what: str, number: int) -> bool:
        if what in ("put", "drop") and self._left.get(number, what) != what:
            raise LawError(
                f"the replay has left the recorded run: group {number} is to {what}, and was not then. Does its reward "
                f"read the world?"
            )
        return self._order[self._at : self._at + 1] == [(what, number)]

    def mark_done(self, what: str, number: int) -> None:
        self._at += 1

    def in_time(self, number: int) -> bool | None:
        return number not in self._late

    async def wait_for_requests(self, version: int) -> None:
        due = self._due[version]
        while due:
            self._news.clear()
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._news.wait()
            except TimeoutError as error:
                raise StalledError(
                    f"the replay waits for {len(due)} requests of version {version} since {PATIENCE:g} s without any"
                ) from error

    def version_spans(self, request: Request) -> tuple[Stint, ...]:
        pieces = self._pieces[request.key, request.continuation]
        if not pieces:
            return ()
        for version, *_ in pieces[-1]:
            self._due[version].discard((request.key, request.continuation, len(pieces)))
        self._news.set()
        return pieces[-1]

    def record_completion(self, request: Request, done: Completion) -> None:
        if done.tokens:
            self._pieces[request.key, request.continuation].pop()
