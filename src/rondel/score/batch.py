"""Calls that come one by one, computed several at once: whoever comes while a batch is computed is in the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, NamedTuple

from rondel.core.errors import RewardError
from rondel.score.clock import pause_clock


class PendingCall(NamedTuple):
    item: Any
    begun: asyncio.Future[None]
    answer: asyncio.Future[Any]


class Batcher:
    """`await Batcher(compute, most=64)(item)`: compute takes up to `most` items and returns as many results.

    size     of an item; a batch holds at most `room` of it, or one item
    lanes    batches open at once; more where computing is waiting
    timed    whether the computing is on the clock of each call in the batch; its place in the queue never is
    door     no batch begins while it is shut
    """

    def __init__(
        self,
        compute: Callable[[list[Any]], Awaitable[list[Any]]],
        *,
        most: int,
        size: Callable[[Any], int] = lambda item: 0,
        room: int = 0,
        lanes: int = 16,
        timed: bool = True,
        door: asyncio.Event | None = None,
    ) -> None:
        self.compute, self.most, self.size, self.room, self.lanes, self.timed = compute, most, size, room, lanes, timed
        self.door, self.waiting = door, deque[PendingCall]()
        self._open: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()  # whether nobody waits and nothing is computed
        self.idle.set()

    async def __call__(self, item: Any) -> Any:
        loop = asyncio.get_running_loop()
        me = PendingCall(item, loop.create_future(), loop.create_future())
        self.waiting.append(me)
        if len(self._open) < self.lanes:
            lane = asyncio.create_task(
                self._process_batches(), context=Context()
            )  # not on the clock of the call that opened it
            self._open.add(lane)
            self.idle.clear()
        with pause_clock():
            await (me.begun if self.timed else asyncio.wait([me.answer]))
        return await me.answer

    async def _process_batches(self) -> None:
        """A lane, until nobody waits. It is closed in the same step in which it finds nobody: whoever comes later
        opens another.
        """
        try:
            await self._serve_lane()
        finally:
            self._open.discard(asyncio.current_task())  # type: ignore[arg-type]  # a task runs this
            if not self._open:
                self.idle.set()

    async def _serve_lane(self) -> None:
        await asyncio.sleep(0)  # who comes in the same turn of the loop comes along
        while True:
            while self.door is not None and not self.door.is_set():
                await self.door.wait()
            if not (batch := self._next_batch()):
                return
            for each in batch:
                each.begun.set_result(None)
            try:
                results = await self.compute([each.item for each in batch])
                if len(results) != len(batch):
                    raise RewardError(f"{len(batch)} were asked about, and {len(results)} answers came")
            except Exception as error:
                for each in batch:
                    if not each.answer.done():
                        each.answer.set_exception(error)
            else:
                for each, result in zip(batch, results):
                    if not each.answer.done():
                        each.answer.set_result(result)

    def _next_batch(self) -> list[PendingCall]:
        batch: list[PendingCall] = []
        used = 0
        while self.waiting and len(batch) < self.most:
            if self.waiting[0].begun.cancelled():  # nobody waits for it any more
                self.waiting.popleft()
                continue
            size = self.size(self.waiting[0].item)
            if batch and self.room and used + size > self.room:
                break
            used += size
            batch.append(self.waiting.popleft())
        return batch
