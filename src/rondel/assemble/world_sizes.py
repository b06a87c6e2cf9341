"""The sizes that a world gives the policy that acts in it, and the model that is learned of it."""

from __future__ import annotations

from typing import Any

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.generate.envs.worlds import open_world
from rondel.models.control.kinds import is_control, is_world_model

Path = str | dict[str, Any]


def with_world_sizes(job: Job) -> Job:
    """The job whose models have the sizes of its world, where their path is a table; ConfigError where they differ."""
    path, data = job.model.path, job.task.data
    if not is_control(path) or job.task.env_kind != "control" or data.get("kind") != "gym":
        return job
    world, spaces = open_world(str(data.get("name", "")), dict(data.get("args") or {}))
    world.close()
    sizes = {"observation_size": spaces.observed, "action_size": spaces.actions, "discrete": spaces.discrete}

    def sized(path: Path, key: str) -> Path:
        given = path if isinstance(path, dict) else _folder_sizes(path)
        for name, size in sizes.items():
            if given.get(name, size) != size:
                raise ConfigError(
                    f"{key} has {name} = {given[name]}, and the world '{data['name']}' wants {size}: leave it out of a "
                    "table, or take a model that was trained in this world",
                    page="docs/control.md",
                )
        return {**path, **sizes} if isinstance(path, dict) else path

    policies = {
        name: policy.model_copy(update={"model": sized(policy.model, f"policies.{name}.model")})
        if policy.model is not None and is_world_model(policy.model)
        else policy
        for name, policy in job.policies.items()
    }
    model = job.model.model_copy(update={"path": sized(path, "model.path")})
    return job.model_copy(update={"model": model, "policies": policies})


def _folder_sizes(path: str) -> dict[str, Any]:
    """Of the config.json in its folder, of whichever kind it is."""
    from rondel.models.control.mlp_policy import MlpPolicyConfig

    found: dict[str, Any] = MlpPolicyConfig.get_config_dict(path)[0]
    return found
