"""Where engine and trainer of a run live: on one device, on two of this process, or in processes of their own.

place.kind   place.cluster
shared       local            one device, one module, 0 bytes move
split        local            two devices of this process, a module each
split        process          place.engines + place.ranks processes of this machine, each on cores (or a GPU) of its own
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondel.assemble.hosts import EngineHost, Known, TrainerHost, engine_of, policy_of, speculation_of, trainer_of
from rondel.assemble.remote import RemoteEngine, RemoteTrainer
from rondel.runtime.cluster.process import ProcessCluster
from rondel.runtime.devices import Device, Shared, Split, pick_device
from rondel.train.checkpoint import bytes_needed
from rondel.train.parallel import ALONE, Alone
from rondel.words.config import Job
from rondel.words.errors import ConfigError
from rondel.words.types import Sampling

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm


@dataclass
class Placed:
    """Engine and trainer as the loop calls them, wherever they are."""

    known: Known
    engine: Any
    trainer: Any
    devices: Shared | Split
    resolved: dict[str, str]
    where: str
    checkpoint_bytes: int
    close: Callable[[], None]


def place(job: Job, row: Algorithm, sampling: Sampling, longest: Callable[[Known], int], folder: Path | None) -> Placed:
    """`longest`: the most tokens of a request, once the tokenizer is known. `folder`: of the run, for what survives a crash; None keeps nothing."""
    where = job.place
    name = pick_device(where.device)
    threads = None if where.threads == "auto" else where.threads
    with ExitStack() as ends:
        if where.kind == "shared":
            placed = _shared(job, row, sampling, longest, name, threads, folder, ends)
        elif where.cluster == "local":
            placed = _split_here(job, row, sampling, longest, name, threads, folder, ends)
        else:
            placed = _split(job, row, sampling, longest, name, threads, folder, ends)
        placed.close = ends.pop_all().close
        return placed


def _shared(
    job: Job, row: Algorithm, sampling: Sampling, longest: Callable, name: str, threads: int | None, folder: Path | None, ends: ExitStack
) -> Placed:
    device = Device(name, threads)
    ends.callback(device.close)
    loaded = device.call(policy_of, job, name)
    known = Known.of(loaded)
    speculation = device.call(speculation_of, job, name)
    engine, ours = engine_of(job, loaded, device, longest(known), speculation, _log(folder))
    trainer, theirs = trainer_of(job, row, sampling, loaded, device, draft=speculation.draft if speculation else None)
    where = f"one process, {_threads(device.threads)} on {name} for engine and trainer"
    return Placed(
        known, engine, trainer, Shared(engine, trainer, how=job.loop.in_flight), ours | theirs, where, bytes_needed(trainer), device.close
    )


def _split_here(
    job: Job, row: Algorithm, sampling: Sampling, longest: Callable, name: str, threads: int | None, folder: Path | None, ends: ExitStack
) -> Placed:
    each = threads or max(1, len(cores()) // 2)
    first, second = _names(name, 2)
    trainer = TrainerHost(job, row, sampling, first, each, _alone)
    ends.callback(trainer.close)
    engine = EngineHost(job, second, each, _log(folder))
    ends.callback(engine.close)
    known, resolved, size = trainer.facts()
    resolved |= engine.open(longest(known))
    where = f"one process, {_threads(each)} each for engine and trainer"
    return Placed(known, engine.engine, trainer.trainer, Split(), resolved, where, size, engine.close)


def _split(
    job: Job, row: Algorithm, sampling: Sampling, longest: Callable, name: str, threads: int | None, folder: Path | None, ends: ExitStack
) -> Placed:
    if job.place.engines != 1:
        raise ConfigError(f"place.engines = {job.place.engines}: one engine so far")
    for section in (job.model, job.model.adapter, job.engine, job.engine.speculative, job.trainer, job.trainer.critic):
        section._read.update(type(section).model_fields)  # by the hosts
    ranks, workers = job.place.ranks, job.place.ranks + job.place.engines
    cluster = ProcessCluster(folder / "logs" if folder else None, patience=job.place.patience)
    ends.callback(cluster.close)
    shares = _shares(workers) if name == "cpu" else [()] * workers
    names = _names(name, workers)
    each = threads or (max(1, len(cores()) // workers) if name == "cpu" else None)
    meeting = f"file://{ends.enter_context(tempfile.TemporaryDirectory(prefix='rondel-'))}/meeting"
    trainers = [
        cluster.spawn(
            f"trainer-{rank}",
            TrainerHost,
            job,
            row,
            sampling,
            names[rank],
            each,
            partial(_rank, rank, ranks, meeting, names[rank]),
            cores=shares[rank],
            tells=rank == 0,
        )
        for rank in range(ranks)
    ]
    engine = cluster.spawn("engine-0", EngineHost, job, names[ranks], each, _log(folder), cores=shares[ranks])
    for worker in (*trainers, engine):
        worker.now()
    known, resolved, size = trainers[0].now("facts")
    resolved |= engine.now("open", longest(known))
    where = f"{workers} processes with {_threads(each)} each: {ranks} of the trainer, {job.place.engines} of the engine"
    return Placed(known, RemoteEngine(engine), RemoteTrainer(trainers), Split(), resolved, where, size, cluster.close)


def _log(folder: Path | None) -> Path | None:
    return folder / "wal" / "engine-0" if folder else None


def _alone() -> Alone:
    return ALONE


def _rank(rank: int, size: int, meeting: str, device: str) -> Alone:
    if size == 1:
        return ALONE
    from rondel.train.fsdp import Sharded

    return Sharded(rank, size, meeting, device=device)


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _shares(workers: int) -> list[tuple[int, ...]]:
    """Cores of its own for each worker, as long as there are enough: two OpenMP pools on one core wait for each other."""
    mine = cores()
    each = len(mine) // workers
    return [tuple(mine[i * each : (i + 1) * each]) for i in range(workers)] if each else [()] * workers


def _names(device: str, workers: int) -> list[str]:
    """One device each, in the order of their numbers: the trainer's ranks first."""
    if device == "cpu":
        return ["cpu"] * workers
    import torch

    first = int(device.partition(":")[2] or 0)
    if first + workers > torch.cuda.device_count():
        raise ConfigError(
            f"place.kind = 'split' asks for {workers} GPUs from number {first} on, but this machine has {torch.cuda.device_count()}. "
            "Use place.kind = 'shared', or fewer place.engines and place.ranks"
        )
    return [f"cuda:{first + i}" for i in range(workers)]


def _threads(n: int | None) -> str:
    return f"{n or 'all'} thread{'s' * (n != 1)}"
