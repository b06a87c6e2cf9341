"""The gate of a run's schedule: everything that a recipe does not determine passes it.

    before   may it happen now?                  may_proceed, in_time, version_spans, wait_for_requests
    after    it has happened                     mark_done, record_completion

`ScheduleGate` lets all pass and remembers nothing. runtime/journal/schedule.py has the two others:
one writes down what passed, one lets pass only what was written down, in that order.
"""

from __future__ import annotations

from typing import Any

from rondel.core.types import Completion, Request, Stint


class ScheduleGate:
    """An open gate: what happens, happens when it can.

    keeps_order  whether somebody may be waiting for what another one did
    """

    keeps_order = False

    def begin_phase(self) -> None:
        """Another phase: its buffer counts from 0."""

    def may_proceed(self, what: str, number: int) -> bool:
        """Whether it is the turn of this: put, drop, pick, admit, ... of a group's number or a version."""
        return True

    def mark_done(self, what: str, number: int) -> None:
        """It was its turn, and it is done."""

    def in_time(self, number: int) -> bool | None:
        """Whether this group ended in time, or was given up as late. None: the clock decides."""
        return None

    async def wait_for_requests(self, version: int) -> None:
        """Whatever was to be asked at this version has been."""

    def wrap_engine(self, engine: Any) -> Any:
        """The engine, whose requests pass the gate."""
        return engine

    def version_spans(self, request: Request) -> tuple[Stint, ...] | None:
        """Where this request has to stand still; () for one that never ended. None: nowhere."""
        return None

    def record_completion(self, request: Request, done: Completion) -> None:
        """An answer, or a piece of one."""

    def close(self) -> None:
        """The run is over."""
