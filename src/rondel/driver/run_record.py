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
        done = await self._engine.generate(replace(request, lines=self._schedule.lines(request)))
        self._schedule.drew(request, done)
        return done

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)


class InOrder:
    """Devices, between two turns."""

    def __init__(self, devices: Any, schedule: Schedule, buffer: Buffer) -> None:
        self.devices, self.schedule, self.buffer = devices, schedule, buffer

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        await self.schedule.asked(self.buffer.version)
        async with self.devices.parked():
            yield
        # what the step has counted is known from here
        await self.buffer.turn("trained", self.buffer.version, who="learner")

    def training(self) -> AbstractAsyncContextManager[None]:
        return self.devices.training()


def finishing(score: Callable[[Group], Awaitable[None]], buffer: Buffer) -> Callable[[Group], Awaitable[None]]:
    async def then(group: Group) -> None:
        await score(group)
        await buffer.turn("finish", group.id, who="roll")

    return then
