"""`run.record` and `rondel replay --into`: what stands around the parts of such a run.

engine      its requests bring their lines and leave their stints
devices     training begins when all has been asked that was asked then, and a step ends when it ended
score       a group is finished when it was
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from rondel.buffer import Buffer
from rondel.core.types import Completion, Group, Request
from rondel.runtime.journal.schedule import Schedule


class ScheduledEngine:
    """The engine, whose requests are recorded or follow their record. Evaluations are at
    one version whole, and need neither.
    """

    def __init__(self, engine: Any, schedule: Schedule) -> None:
        self._engine, self._schedule = engine, schedule

    async def generate(self, request: Request) -> Completion:
        if request.namespace:
            return await self._engine.generate(request)
        done = await self._engine.generate(replace(request, lines=self._schedule.version_spans(request)))
        self._schedule.record_completion(request, done)
        return done

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)


class InOrder:
    """Devices, between two turns."""

    def __init__(self, devices: Any, schedule: Schedule, buffer: Buffer) -> None:
        self.devices, self.schedule, self.buffer = devices, schedule, buffer

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        await self.schedule.wait_for_requests(self.buffer.version)
        async with self.devices.parked():
            yield
        # what the step has counted is known from here
        await self.buffer.take_turn("trained", self.buffer.version, who="learner")

    def training(self) -> AbstractAsyncContextManager[None]:
        return self.devices.training()


def score_in_turn(score: Callable[[Group], Awaitable[None]], buffer: Buffer) -> Callable[[Group], Awaitable[None]]:
    async def score_in_order(group: Group) -> None:
        await score(group)
        await buffer.take_turn("finish", group.id, who="roll")

    return score_in_order
