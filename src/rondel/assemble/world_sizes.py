"""The sizes that a world gives the policy that acts in it."""

from __future__ import annotations

from typing import Any

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.generate.envs.worlds import open_world
from rondel.models.control.kinds import is_control


def with_world_sizes(job: Job) -> Job:
    """The job whose model has the sizes of its world, where model.path is a table; ConfigError where they differ."""
    path, data = job.model.path, job.task.data
    if not is_control(path) or job.task.env_kind != "control" or data.get("kind") != "gym":
        return job
    world, spaces = open_world(str(data.get("name", "")), dict(data.get("args") or {}))
    world.close()
    sizes = {"observation_size": spaces.observed, "action_size": spaces.actions, "discrete": spaces.discrete}
    given = path if isinstance(path, dict) else _folder_sizes(path)
    for name, size in sizes.items():
        if given.get(name, size) != size:
            raise ConfigError(
                f"model.path has {name} = {given[name]}, and the world '{data['name']}' wants {size}: leave it out of a "
                "table, or take a model that was trained in this world",
                page="docs/control.md",
            )
    if not isinstance(path, dict):
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"path": {**path, **sizes}})})


def _folder_sizes(path: str) -> dict[str, Any]:
    from rondel.models.control.mlp_policy import MlpPolicyConfig

    found: dict[str, Any] = MlpPolicyConfig.from_pretrained(path).to_dict()
    return found
