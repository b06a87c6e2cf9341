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
MOMENT = 10.0  # seconds in which engines are told that an update is over


class WeightDelivery:
    """The updates of one run. An engine that ends in the middle of one is started again, and the update is made again;
    so it is where the weights can go another way than the one that failed.

    broken  set when a delivery beside a step has failed for good; `finish` raises why
    """

    def __init__(self, update: WeightUpdate, placed: Deployment) -> None:
        self.update, self.placed = update, placed
        self._may_lose_engines = placed.may_lose_engines
        self.broken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._missed: Buffer | None = None  # whose engines did not get what was published last, and need it another way

    async def update_engines(self, trainer: Any, engine: Any) -> int:
        """-> the version that they serve."""
        await self._wait()
        version = await self._repeat_healed(lambda: self.update(trainer, engine))
        if self._missed is not None:
            self._missed.end_delivery()
            self._missed = None
        return version

    async def start(self, trainer: Any, engine: Any, buffer: Buffer) -> int:
        """Publish, and deliver beside what comes next. -> the version that engines are going to serve."""

        async def publish() -> Snapshot | None:  # the other way may keep none
            return await self.update.publish(trainer, engine) if self.update.keeps_snapshots else None

        await self._wait()
        snapshot = None if self._missed is not None else await self._repeat_healed(publish)
        if snapshot is None:
            return await self.update_engines(trainer, engine)
        buffer.begin_delivery()
        self._running = asyncio.create_task(self._deliver(snapshot, buffer), name="delivery")
        return snapshot.manifest.version

    async def finish(self, trainer: Any, engine: Any) -> None:
        """Between two steps: engines serve what was published last, or the error says why not."""
        await self._wait()
        if self._missed is not None:
            await self.update_engines(trainer, engine)

    async def _wait(self) -> None:
        if self._running is not None:
            await asyncio.shield(self._running)

    async def cancel(self) -> None:
        """The run is over. An engine that does not answer is not waited for: it is ended next."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running], timeout=MOMENT)

    async def _deliver(self, snapshot: Snapshot, buffer: Buffer) -> None:
        try:
            await self._repeat_healed(lambda: self.update.deliver(snapshot), again=False)
        except Exception as error:
            if self.update.makes_good(snapshot, error):  # the trainer is at its next step
                self._missed = buffer
                return
            error.add_note(f"while version {snapshot.manifest.version} was delivered beside the next step")
            self.broken.set()
            raise
        buffer.end_delivery()

    async def _repeat_healed(self, work: Callable[[], Awaitable[T]], *, again: bool = True) -> T:
        """Once more if an engine ended in the middle of it; if a rank of the trainer did, that is the error. `again`:
        also another way.
        """
        while True:
            try:
                done = await work()
            except (WorkerError, StalledError, SyncError, EngineError) as error:
                if not await self.placed.restart_engines():
                    if ended := await self.placed.lost():
                        raise ended from error
                    if not again or not self.update.fall_back(error):
                        raise
            else:
                if self._may_lose_engines:
                    await self.placed.restart_engines()  # one of several, which was left behind
                return done
