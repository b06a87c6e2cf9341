"""When engines get new weights: while the trainer waits, or beside its next step.

    waits     train ─ publish ─ deliver ─ train ─ publish ─ deliver           whoever is admitted is born at the version trained
    beside    train ─ publish ─ train ─────────── publish ─ train
                              └ deliver ┘                 └ deliver ┘        until it ends, at the one before

Beside, one delivery is under way at most: the next publication waits for it, and so do evaluations and checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rondel.buffer import Buffer
from rondel.core.errors import EngineError, StalledError, SyncError, WorkerError

if TYPE_CHECKING:
    from rondel.assemble.placement import Deployment
    from rondel.sync.update import Snapshot, WeightUpdate

T = TypeVar("T")


class WeightDelivery:
    """The updates of one run. An engine that ends in the middle of one is started again, and the update is made again.

    broken  set when a delivery beside a step has failed for good; `finish` raises why
    """

    def __init__(self, update: WeightUpdate, placed: Deployment) -> None:
        self.update, self.placed = update, placed
        self.broken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def update_engines(self, trainer: Any, engine: Any) -> int:
        """-> the version that they serve."""
        await self.finish()
        return await self._repeat_healed(lambda: self.update(trainer, engine))

    async def start(self, trainer: Any, engine: Any, buffer: Buffer) -> int:
        """Publish, and deliver beside what comes next. -> the version that engines are going to serve."""
        await self.finish()
        snapshot = await self._repeat_healed(lambda: self.update.publish(trainer, engine))
        buffer.begin_delivery()
        self._running = asyncio.create_task(self._deliver(snapshot, buffer), name="delivery")
        return snapshot.manifest.version

    async def finish(self) -> None:
        """Engines serve what was published last, or the error says why not."""
        if self._running is not None:
            await asyncio.shield(self._running)

    async def cancel(self) -> None:
        """The run is over."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _deliver(self, snapshot: Snapshot, buffer: Buffer) -> None:
        try:
            await self._repeat_healed(lambda: self.update.deliver(snapshot))
        except Exception as error:
            error.add_note(f"while version {snapshot.manifest.version} was delivered beside the next step")
            self.broken.set()
            raise
        buffer.end_delivery()

    async def _repeat_healed(self, work: Callable[[], Awaitable[T]]) -> T:
        """Once more if an engine ended in the middle of it; if a rank of the trainer did, that is the error."""
        while True:
            try:
                done = await work()
            except (WorkerError, StalledError, SyncError, EngineError) as error:
                if not await self.placed.restart_engines():
                    if ended := await self.placed.lost():
                        raise ended from error
                    raise
            else:
                await self.placed.restart_engines()  # one of several, which was left behind
                return done
