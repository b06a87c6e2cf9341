"""The sizes that a world gives the policy that acts in it, and the model that is learned of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rondel.core.config.environment import ControlConfig
from rondel.core.config.job import Job
from rondel.core.config.policy import PolicyConfig
from rondel.core.errors import ConfigError
from rondel.generate.envs.frame_worlds import open_frame_world
from rondel.generate.envs.worlds import WorldSpaces, call_world, open_world
from rondel.models.control.kinds import MLP_POLICY, draws_chunks, is_control, is_world_model, reads_pictures

Path = str | dict[str, Any]
RANDOM = 256  # steps of a world that measure its scales, before the run
PIXELS = ControlConfig.model_fields["pixels"].default
STILL = 1e-6  # a deviation below which a number does not move


def with_world_sizes(job: Job) -> Job:
    """The job whose models have the sizes of its world, where their path is a table; ConfigError where they differ."""
    path, data = job.model.path, job.task.data
    if not is_control(path) or job.task.env_kind != "control" or data.get("kind") != "gym":
        return job
    name, args = str(data.get("name", "")), dict(data.get("args") or {})
    shows, pixels = reads_pictures(path), job.task.env_settings.get("pixels", PIXELS)
    world, spaces = open_frame_world(name, args, pixels) if shows else open_world(name, args)
    if draws_chunks(path) and spaces.discrete:
        raise ConfigError(
            f"model.path draws chunks of numbers, and the world '{name}' takes one of {spaces.actions} actions: take "
            f'{{ random = "{MLP_POLICY}" }}',
            page="docs/control.md",
        )
    scales = measure_scales(name, world, spaces) if any(map(_is_new_model, job.policies.values())) else {}
    world.close()
    sizes: dict[str, Any] = {"observation_size": spaces.observed, "action_size": spaces.actions}
    sizes |= {"discrete": spaces.discrete} | ({"frame": list(spaces.observation_space.shape[:2])} if shows else {})

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

    def with_model(name: str, policy: PolicyConfig) -> PolicyConfig:
        if policy.model is None or not is_world_model(policy.model):
            return policy
        found = sized(policy.model, f"policies.{name}.model")
        return policy.model_copy(update={"model": {**scales, **found} if isinstance(found, dict) else found})

    policies = {name: with_model(name, policy) for name, policy in job.policies.items()}
    model = job.model.model_copy(update={"path": sized(path, "model.path")})
    return job.model_copy(update={"model": model, "policies": policies})


def _is_new_model(policy: PolicyConfig) -> bool:
    return isinstance(policy.model, dict) and is_world_model(policy.model)


def measure_scales(name: str, world: Any, spaces: WorldSpaces) -> dict[str, list[float]]:
    """centre, spread and step of `MlpWorldConfig`, from RANDOM steps of the world with random actions."""
    world.action_space.seed(0)
    seen, changes, rewards, last = list[np.ndarray](), list[np.ndarray](), list[float](), None
    for number in range(RANDOM):
        if last is None:
            last = spaces.observe(call_world(name, world.reset, seed=number)[0])
        shown, reward, terminated, truncated, _ = call_world(name, world.step, world.action_space.sample())
        after = spaces.observe(shown)
        seen.append(last)
        changes.append(after - last)
        rewards.append(float(reward))
        last = None if terminated or truncated else after
    observed = np.array(seen, np.float64)
    spread, step = observed.std(0), np.append(np.sqrt(np.square(changes).mean(0)), np.std(rewards))
    scales = {"centre": observed.mean(0), "spread": spread, "step": step}
    plain = {"spread": spread < STILL, "step": step < STILL}
    return {key: np.where(plain.get(key, False), 1.0, value).tolist() for key, value in scales.items()}


def _folder_sizes(path: str) -> dict[str, Any]:
    """Of the config.json in its folder, of whichever kind it is."""
    from rondel.models.control.mlp_policy import MlpPolicyConfig

    found: dict[str, Any] = MlpPolicyConfig.get_config_dict(path)[0]
    return found
