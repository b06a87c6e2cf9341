"""Runs that are recorded under random delays, and done again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import torch

from kits.runs import final, tiny
from rondel.core.config.job import Job
from rondel.core.events import Admitted, Event, GroupFinished, StepDone, subscribe
from rondel.driver import replay
from rondel.runtime.journal import store

BASE = {
    "engine__numerics": "aligned", "engine__sampling": {"max_tokens": 20, "ignore_eos": True}, "loop__warmup__steps": 1, "loop__steps": 3, "loop__window": "auto",
    "algo__correction": {"kind": "importance"}, "task__reward": "kits.rewards:parity", "run__record": True, "loop__max_staleness": 1,
    "engine__max_running": 8, "engine__prefill_tokens": 16, "loop__groups_per_step": 3, "algo__group_size": 3, "task__eval__n": 2,
}  # fmt: skip


SPLIT = {"place__kind": "split", "place__cluster": "local"}


class Straggler:
    """The first group that is asked for after the supervised steps gets no reward before it is given up."""

    def __init__(self) -> None:
        self.task, self.ready = "", False

    def hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.ready = True
        elif isinstance(event, Admitted) and self.ready and not self.task:
            self.task = event.task
        elif isinstance(event, GroupFinished) and event.task == self.task:
            self.task = "nobody's"

    def wait_in(self, score):
        async def waiting(trajectory, task):
            while task.id == self.task:
                await asyncio.sleep(0.005)
            return await score(trajectory, task)

        return waiting


def delays(seed: int, straggler: Straggler | None = None, engine_s: float = 0.004):
    """Engine and trainer sleep a while before each thing that they do, the engine at most so many seconds."""
    chance = random.Random(seed)

    def slow(function, most):
        async def later(*args, **how):
            await asyncio.sleep(chance.random() * most)
            return await function(*args, **how)

        return later

    def built(parts) -> None:
        for engine in getattr(parts.engine, "each", {"": parts.engine}).values():
            serving = getattr(engine, "serving", engine)
            serving.run = slow(serving.run, engine_s)
        parts.trainer.step = slow(parts.trainer.step, 0.03)
        parts.pool.score = slow(parts.pool.score, 0.02)
        if straggler:
            parts.pool.score = straggler.wait_in(parts.pool.score)

    return built


def record(folder: Path, seed: int, straggler: Straggler | None = None, **changes) -> list[dict]:
    return record_job(tiny(folder, **{**BASE, **changes}), seed, straggler)


def record_job(job: Job, seed: int, straggler: Straggler | None = None, engine_s: float = 0.004) -> list[dict]:
    from rondel.assemble import train

    folder, deaf = Path(job.run.folder), subscribe(straggler.hear) if straggler else lambda: None
    try:
        train(job, quiet=True, built=delays(seed, straggler, engine_s))
    finally:
        deaf()
    return [
        row
        for step in store.stored_steps(folder)
        for row in store.read_step(folder, step)
        if row["env"] and row["trained_at"] >= 1
    ]


def again(folder: Path, into: Path, seed: int | None = None) -> None:
    from rondel.assemble import train

    job, schedule = replay.again(folder, into)
    train(job, quiet=True, built=None if seed is None else delays(seed), schedule=schedule)
    assert replay.differences(folder, into) == []
    one, other = final(folder), final(into)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
