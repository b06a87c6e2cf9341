"""What a recipe says of its tasks and its sampling, as the parts that read it: without torch."""

from __future__ import annotations

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, error_boundary
from rondel.core.types import Sampling
from rondel.generate.envs.sources import TaskSet, load_evaluation_sets, load_tasks


def load_run_tasks(job: Job, trains: bool = True) -> TaskSet:
    """What task.data and task.eval.sets bring."""
    env = job.task.env_kind
    return load_evaluation_sets(job.task.eval.sets, load_tasks(job.task.data, env=env), env=env, trains=trains)


def sampling_of(job: Job) -> Sampling:
    """engine.sampling as the engine takes it."""
    section = job.engine.sampling
    with error_boundary(ConfigError, "engine.sampling"):
        return Sampling(**{**section.to_values(), "stop": tuple(section.stop)})
