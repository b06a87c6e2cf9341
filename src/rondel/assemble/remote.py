"""Engine and trainer that live elsewhere, as the loop calls them: the protocols, over proxies with the same awaitable verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rondel.train.pack import Batch
from rondel.words.errors import EngineError, StalledError, WorkerError
from rondel.words.events import Warned, emit
from rondel.words.protocols import Remote
from rondel.words.types import Message, StepStats

RESTARTS = 5  # of one engine in one run


class RemoteEngine:
    """One engine in another process. One that ends is started again, takes the weights that serve from where they lie, and is asked again:
    requests keep their keys, and its token log has what the first life drew. Only an update is not repeated here: it is a transaction.

    start     another worker that is asked for nothing yet
    longest   what it is opened with
    catch_up  brings a newcomer the weights that serve; set once there is an update
    """

    def __init__(self, worker: Remote, start: Callable[[], Remote], longest: int) -> None:
        self._worker, self._start, self._longest = worker, start, longest
        self.catch_up: Callable[[Any], Awaitable[int]] | None = None
        self.version = self.restarts = 0
        self._one = asyncio.Lock()

    async def receive(self, message: Message) -> int:
        self.version = await self._worker.receive(message)
        return self.version

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*args: Any, **how: Any) -> Any:
            while True:
                worker = self._worker
                try:
                    return await getattr(worker, verb)(*args, **how)
                except (WorkerError, StalledError) as error:
                    if worker.alive:
                        raise
                    await self._again(worker, error)

        return call

    async def whole(self) -> bool:
        """Start it again if it has ended. -> had it?"""
        if (worker := self._worker).alive:
            return False
        await self._again(worker, WorkerError(worker.fate))
        return True

    async def _again(self, dead: Remote, why: Exception) -> None:
        async with self._one:
            while self._worker is dead:
                self.restarts += 1
                if self.restarts > RESTARTS:
                    raise EngineError(f"an engine ended {self.restarts} times, the last time: {why}") from why
                emit(
                    Warned(
                        f"{why}\nIt is started again ({self.restarts} of at most {RESTARTS} times); its requests go on from their tokens"
                    )
                )
                fresh = self._start()
                try:
                    await fresh.ready()
                    await fresh.open(self._longest)
                    if self.catch_up is not None:
                        self.version = await self.catch_up(fresh)
                except BaseException as error:
                    if fresh.alive or not isinstance(error, WorkerError | StalledError):
                        fresh.dismiss()
                        raise
                    why = error
                else:
                    self._worker = fresh


class RemoteTrainer:
    """All ranks of a trainer: each is asked the same, the first one's answer counts, the first error is everyone's."""

    def __init__(self, ranks: list[Remote]) -> None:
        self._ranks = ranks
        self.moved = False

    async def annotate(self, batch: Batch, needs: frozenset[str], model: str = "policy") -> Batch:
        _learn(batch, await self._all("annotate", batch, needs, model))
        return batch

    async def step(self, batch: Batch, algo: Any, model: str = "policy") -> StepStats:
        stats, self.moved, told = await self._all("step", batch, algo, model)
        _learn(batch, told)
        return stats

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*args: Any) -> Any:
            return await self._all(verb, *args)

        return call

    async def _all(self, verb: str, *args: Any) -> Any:
        async with asyncio.TaskGroup() as asked:
            answers = [asked.create_task(getattr(rank, verb)(*args)) for rank in self._ranks]
        return answers[0].result()


def _learn(batch: Batch, told: list[dict[str, Any]]) -> None:
    """What the ranks found out about their copies of the samples."""
    for sample, learned in zip(batch.samples, told, strict=True):
        sample.notes.update(learned["notes"])
        sample.advantages = learned["advantages"]
