"""`rondel replay`: one step again from its stored rollouts, without an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rondel.algos.table import SFT
from rondel.assemble.parts import build
from rondel.assemble.rollouts import prepare, prepare_of
from rondel.runtime.devices import keep_memory
from rondel.runtime.journal import store
from rondel.train.checkpoint import flaw
from rondel.words.config import Job
from rondel.words.errors import UserError
from rondel.words.types import StepStats


def replay(folder: str | Path, step: int) -> dict[str, float]:
    """Start from the newest checkpoint before `step` (or the starting weights), train the stored steps up to it. -> its metrics."""
    keep_memory()
    folder = Path(folder)
    job = Job.read(folder / "job.toml")
    start, path = _before(folder, step)
    missing = sorted(set(range(start + 1, step + 1)) - set(store.steps(folder)))
    if missing:
        raise UserError(f"the rollouts of step {missing[0]} are not stored in {folder}, so step {step} cannot be reached from step {start}")
    parts = build(job.on_one_device())
    try:
        return asyncio.run(_replay(parts, folder, start, step, path))
    finally:
        parts.close()


async def _replay(parts, folder: Path, start: int, step: int, path: Path | None) -> dict[str, float]:
    if path is not None:
        await parts.trainer.load(path)
    stats = StepStats(False, {})
    for number in range(start + 1, step + 1):
        warm = number <= parts.job.loop.warmup.steps
        algo, make = (SFT, prepare) if warm else (parts.algo, prepare_of(parts))
        groups = store.groups_of(store.read_step(folder, number))
        batch = await make(groups)
        async with parts.placed.devices.parked(), parts.placed.devices.training():
            stats = await parts.trainer.step(batch, algo)
    return stats.metrics


def _before(folder: Path, step: int) -> tuple[int, Path | None]:
    for path in sorted((folder / "checkpoints").glob("step-*"), reverse=True):
        if flaw(path) is None and (saved := json.loads((path / "state.json").read_text())["step"]) < step:
            return saved, path
    return 0, None
