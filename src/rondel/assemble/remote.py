"""Engine and trainer that live elsewhere, as the loop calls them: the protocols, over proxies with the same awaitable verbs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rondel.train.pack import Batch
from rondel.words.protocols import Remote
from rondel.words.types import Manifest, Message, Route, StepStats


class RemoteEngine:
    """One engine in another process. Its verbs are the worker's; its version is remembered here."""

    def __init__(self, worker: Remote) -> None:
        self._worker = worker
        self.version = 0

    async def receive(self, message: Message) -> int:
        self.version = await self._worker.receive(message)
        return self.version

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._worker, verb)


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

    async def logprobs(self, tokens: list[int]) -> list[float]:
        return await self._all("logprobs", tokens)

    async def publish(self, route: Route) -> tuple[Manifest, Route]:
        return await self._all("publish", route)

    async def send(self, route: Route) -> None:
        await self._all("send", route)

    async def save(self, path: Path) -> None:
        await self._all("save", path)

    async def load(self, path: Path) -> None:
        await self._all("load", path)

    async def sleep(self, tags: tuple[str, ...]) -> None:
        await self._all("sleep", tags)

    async def wake(self, tags: tuple[str, ...]) -> None:
        await self._all("wake", tags)

    async def _all(self, verb: str, *args: Any) -> Any:
        async with asyncio.TaskGroup() as asked:
            answers = [asked.create_task(getattr(rank, verb)(*args)) for rank in self._ranks]
        return answers[0].result()


def _learn(batch: Batch, told: list[dict[str, Any]]) -> None:
    """What the ranks found out about their copies of the samples."""
    for sample, learned in zip(batch.samples, told, strict=True):
        sample.notes.update(learned["notes"])
        sample.advantages = learned["advantages"]
