"""The parts of a run behind the gate of its schedule, for `run.record` and `rondel replay --into`.

devices     training begins when all has been asked that was asked then, and a step ends when it ended
score       a group is finished when it was
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from rondel.buffer import Buffer
from rondel.core.schedule_gate import ScheduleGate
from rondel.core.types import Group


class OrderedDevices:
    """Devices, between two turns."""

    def __init__(self, devices: Any, gate: ScheduleGate, buffer: Buffer) -> None:
        self.devices, self.gate, self.buffer = devices, gate, buffer

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        await self.gate.wait_for_requests(self.buffer.version)
        async with self.devices.parked():
            yield
        # what the step has counted is known from here
        await self.buffer.waiters.pass_gate("trained", self.buffer.version, who="learner")

    def training(self) -> AbstractAsyncContextManager[None]:
        return self.devices.training()


def score_in_turn(score: Callable[[Group], Awaitable[None]], buffer: Buffer) -> Callable[[Group], Awaitable[None]]:
    async def score_in_order(group: Group) -> None:
        await score(group)
        await buffer.waiters.pass_gate("finish", group.id, who="roll")

    return score_in_order
