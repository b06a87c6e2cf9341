"""Which cores or GPUs each worker of a machine gets."""

from __future__ import annotations

import os

import torch

from rondel.core.errors import ConfigError
from rondel.core.events import Warned, emit
from rondel.system.cpu_quota import usable_processors


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cores_per_worker(workers: int) -> list[tuple[int, ...]]:
    """Cores of its own for each worker, as long as there are enough: two OpenMP pools on one core
    wait for each other.
    """
    mine = usable_cores()
    each = len(mine) // workers
    return [tuple(mine[i * each : (i + 1) * each]) for i in range(workers)] if each else [()] * workers


def warn_if_crowded(ranks: int, engines: int) -> None:
    """Ranks compute at the same time and wait for each other, and so do the processes of the engines: beyond the cores
    that this process may use more of them make a run slower.
    """
    cores = usable_processors()
    crowds = [
        f"{n} {whose} processes ({key})"
        for n, whose, key in ((ranks, "trainer", "place.ranks or place.mesh"), (engines, "engine", "place.engines"))
        if n > cores
    ]
    if crowds:
        emit(
            Warned(
                f"this process may use {cores} core{'s' * (cores != 1)} for {' and '.join(crowds)}: they take turns, "
                f"which is slower than {cores} would be, and each needs its own memory. Use at most {cores}, or GPUs, "
                'or more machines with place.cluster = "ray"'
            )
        )


def device_names(device: str, workers: int) -> list[str]:
    """One device each, in the order of their numbers: the trainer's ranks first."""
    if device == "cpu":
        return ["cpu"] * workers
    first = int(device.partition(":")[2] or 0)
    if first + workers > torch.cuda.device_count():
        raise ConfigError(
            f"place.kind = 'split' asks for {workers} GPUs from number {first} on, but this machine has "
            f"{torch.cuda.device_count()}. "
            "Use place.kind = 'shared', or fewer place.engines and place.ranks"
        )
    return [f"cuda:{first + i}" for i in range(workers)]


def format_threads(n: int | None) -> str:
    return f"{n or 'all'} thread{'s' * (n != 1)}"
