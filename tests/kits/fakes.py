"""Ten-line fakes: an engine that scripts, a trainer that counts. For laws and speed,
never instead of an end-to-end test.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

from rondel.core.events import Event, subscribe
from rondel.core.types import KEEP, Group, StepStats, Task, Trajectory, Verdict


async def endless():
    n = 0
    while True:
        yield Task(f"t{n}", "fake", {})
        n += 1


class Rollouts:
    """Attempts that take a random number of scheduler turns; some groups are dropped."""

    def __init__(self, seed: int, drop: float = 0.0, spread: int = 8) -> None:
        self.random, self.drop, self.spread = random.Random(seed), drop, spread

    async def generate_group(self, slot):
        for _ in range(self.random.randrange(self.spread) * (8 if self.random.random() < 0.1 else 1)):
            await asyncio.sleep(0)
        return Group(slot.number, slot.task, [Trajectory()], slot.born)

    async def score(self, group) -> None:
        await asyncio.sleep(0)

    def judge(self, group) -> Verdict:
        return Verdict(False, "unlucky") if self.random.random() < self.drop else KEEP


class CountingTrainer:
    """Its weights are a number."""

    def __init__(self) -> None:
        self.version, self.seen = 0, []

    async def step(self, batch, algo) -> StepStats:
        await asyncio.sleep(0)
        self.seen.append([(g.id, g.born, self.version) for g in batch])
        return StepStats(True, {})

    async def sync(self, trainer, engine) -> int:
        self.version += 1
        return self.version


class NoDevices:
    @asynccontextmanager
    async def training(self):
        yield

    parked = training


async def as_is(groups):
    return groups


async def nothing(step, version, batch) -> None:
    pass


def loop_kit(trainer: CountingTrainer, rollouts: Rollouts, steps: int) -> dict:
    return dict(
        attempt=rollouts.generate_group, score=rollouts.score, judge=rollouts.judge, prepare=as_is, trainer=trainer, engine=None,
        devices=NoDevices(), sync=trainer.sync, algo=None, steps=range(steps), milestone=nothing,
    )  # fmt: skip


class Heard:
    """All events of one class while it is open."""

    def __init__(self, kind: type[Event]) -> None:
        self.kind, self.all = kind, []

    def __enter__(self) -> list:
        self._stop = subscribe(lambda event: self.all.append(event) if isinstance(event, self.kind) else None)
        return self.all

    def __exit__(self, *_) -> None:
        self._stop()
