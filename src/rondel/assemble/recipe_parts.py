"""What a recipe says of its tasks and its sampling, as the parts that read it: without torch."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, error_boundary
from rondel.core.types import Sampling
from rondel.generate.envs.sources import TaskSet, load_evaluation_sets, load_tasks


def load_run_tasks(job: Job, trains: bool = True) -> TaskSet:
    """What task.data and task.eval.sets bring, with task.env.shots of it set aside."""
    env, n, seed = job.task.env_kind, job.task.episode.shots, job.task.data.get("seed", 0)
    found = load_tasks(job.task.data, env=env)
    # a task of an evaluation is not shown either, and an evaluation shows what the run did
    tasks = load_evaluation_sets(job.task.eval.sets, found, env=env, trains=trains or n > 0)
    return set_shots_aside(tasks, n, seed) if n else tasks


def set_shots_aside(tasks: TaskSet, n: int, seed: int) -> TaskSet:
    """`tasks` with n of the training tasks as `shots`: drawn by their ids and the seed of the data, in whatever order
    they come.
    """
    drawn = sorted(tasks.train, key=lambda task: blake2b(f"shots/{seed}/{task.id}".encode(), digest_size=8).digest())
    shots = tuple(drawn[:n])
    gone = {task.id for task in shots}
    train, held_out, *of_sources = (
        [task for task in own if task.id not in gone]
        for own in (tasks.train, tasks.held_out, *(own for _, own in tasks.sources))
    )
    if not train or not all(of_sources):
        raise ConfigError(
            f"task.env.shots = {n} leaves nothing to train on, or nothing of a source: there are {len(tasks.train)} "
            "training tasks, and what is shown is not trained on; lower it"
        )
    sources = tuple((weight, own) for (weight, _), own in zip(tasks.sources, of_sources))
    return replace(tasks, train=train, held_out=held_out, sources=sources, shots=shots)


def sampling_of(job: Job) -> Sampling:
    """engine.sampling as the engine takes it."""
    section = job.engine.sampling
    with error_boundary(ConfigError, "engine.sampling"):
        return Sampling(**{**section.to_values(), "stop": tuple(section.stop)})
