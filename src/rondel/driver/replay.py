"""`rondel replay`: one step again from its stored rollouts, without an engine; or a recorded run whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rondel.algos.table import SFT
from rondel.assemble.components import build
from rondel.assemble.facts import facts_of, warn_of_other_arithmetic
from rondel.core.clocks import run_loop
from rondel.core.config.job import Job
from rondel.core.errors import UserError
from rondel.core.types import StepStats
from rondel.driver.rollouts import prepare, prepare_of
from rondel.runtime.devices import prepare_process
from rondel.runtime.journal import store
from rondel.runtime.journal.log import read
from rondel.runtime.journal.schedule import OrderReplayer
from rondel.system.files import checkpoints_in
from rondel.train.checkpoint import find_flaw

CLOCK = ("timings",)  # columns of a stored rollout that a replay has of its own


def replay(folder: str | Path, step: int) -> dict[str, float]:
    """Start from the newest checkpoint before `step` (or the starting weights), train the
    stored steps up to it. -> its metrics.
    """
    prepare_process()
    folder = Path(folder)
    job = Job.read(folder / "job.toml")
    start, path = _checkpoint_before(folder, step)
    missing = sorted(set(range(start + 1, step + 1)) - set(store.stored_steps(folder)))
    if missing:
        raise UserError(
            f"the rollouts of step {missing[0]} are not stored in {folder}, so step {step} cannot be reached from step "
            f"{start}"
        )
    parts = build(job.on_one_device())
    warn_of_other_arithmetic(f"step {step} is replayed", folder, facts_of(parts), step)
    try:
        return run_loop(_replay_step(parts, folder, start, step, path))
    finally:
        parts.close()


async def _replay_step(parts, folder: Path, start: int, step: int, path: Path | None) -> dict[str, float]:
    if path is not None:
        await parts.trainer.load(path)
    stats, again = StepStats(False, {}), parts.returning
    if again is not None:
        again.restore_steps(folder, range(parts.job.loop.warmup.steps + 1, start + 1))
    for number in range(start + 1, step + 1):
        warm = number <= parts.job.loop.warmup.steps
        algo, make = (SFT, prepare) if warm else (parts.algo, prepare_of(parts))
        groups = store.groups_of(store.read_step(folder, number))
        if again is not None and not warm:
            again.record_step(number, groups)
        batch = await make(groups)
        async with parts.placed.devices.parked(), parts.placed.devices.training():
            stats = await parts.trainer.step(batch, algo)
    return stats.metrics


def _checkpoint_before(folder: Path, step: int) -> tuple[int, Path | None]:
    for saved, path in reversed(checkpoints_in(folder / "checkpoints").items()):
        if saved < step and find_flaw(path) is None:
            return saved, path
    return 0, None


# -- a recorded run, whole ---------------------------------------------------------------------------


def again(folder: Path, into: Path) -> tuple[Job, OrderReplayer]:
    """What trains the whole run again, into another folder: `train(job, schedule=...)`. On
    one device of this process, wherever it was; several ranks of a trainer as so many processes of this
    machine, since the order of their sums is theirs."""
    job = Job.read(folder / "job.toml")
    if into.exists() and any(into.iterdir()):
        raise UserError(f"{into} is not empty: give --into a folder of its own")
    if not any(event["kind"] == "RunEnded" for event in read(folder)):
        raise UserError(f"{folder} has not ended: its schedule ends in the middle of a step")
    schedule, alone = OrderReplayer(folder), job.on_one_device()
    if job.place.ranks > 1:
        apart = {"kind": "split", "cluster": "process", "ranks": job.place.ranks}
        alone = alone.model_copy(update={"place": alone.place.model_copy(update=apart)})
    room = {
        "max_running": 2 * job.engine.max_running,
        "kv_pages": "auto",
        "concurrency": "fixed",
    }  # who stands at a line must not be in the way
    run = job.run.model_copy(update={"folder": str(into), "record": False})
    repeated = alone.model_copy(update={"engine": alone.engine.model_copy(update=room), "run": run})
    repeated.mark_everything_read()  # a job.toml names every key: what has no effect was refused when the run began
    return repeated, schedule


def differences(one: Path, other: Path) -> list[str]:
    """Between stored rollouts, metrics, and the digests of all weights, the clock apart. Warns of other arithmetic."""
    found = []
    started = [event["facts"] for event in read(other) if event["kind"] == "RunStarted"]
    warn_of_other_arithmetic(f"{other} was computed", one, started[-1])
    for step in sorted({*store.stored_steps(one), *store.stored_steps(other)}):
        first, second = ([_without_clock(row) for row in store.read_step(folder, step)] for folder in (one, other))
        if len(first) != len(second):
            found.append(f"step {step}: {len(first)} and {len(second)} samples")
        for mine, theirs in zip(first, second):
            found += [
                f"step {step}, group {mine['group']}, sample {mine['sample']}: {k}"
                for k in mine
                if mine[k] != theirs[k]
            ]
    for kind, names in (("Synced", ("version", "root")), ("StepDone", ("step", "version", "metrics", "ledger"))):
        rows = [
            [{name: e[name] for name in names} for e in read(folder) if e["kind"] == kind] for folder in (one, other)
        ]
        if len(rows[0]) != len(rows[1]):
            found.append(f"{len(rows[0])} and {len(rows[1])} {kind}")
        found += [
            f"version {a['version']}: {name}"
            for a, b in zip(*rows)
            for name in names
            if _comparable_value(a[name]) != _comparable_value(b[name])
        ]
    return found


def _without_clock(row: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) for name, value in row.items() if name not in CLOCK}


def _comparable_value(value: Any) -> str:
    return repr({k: v for k, v in value.items() if not k.endswith("_s")} if isinstance(value, dict) else value)
