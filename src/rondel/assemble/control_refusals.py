"""What a recipe of a policy of actions cannot have, and the sizes that its world gives it."""

from __future__ import annotations

from typing import Any

from rondel.assemble.flow_refusals import refusals_of_steps
from rondel.assemble.rows import AlgorithmRows
from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, ModelError, UserError
from rondel.core.types import Sampling
from rondel.generate.engine.control.action_request import refuse_sampling
from rondel.generate.envs.control import open_world
from rondel.models.control.kinds import MLP_POLICY, is_control

PAGE = "docs/control.md"
WIDTH = 16  # a multiple of which a layer's width is: elementwise functions then give a row the same bits in every batch


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
                page=PAGE,
            )
    if not isinstance(path, dict):
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"path": {**path, **sizes}})})


def _folder_sizes(path: str) -> dict[str, Any]:
    from rondel.models.control.mlp_policy import MlpPolicyConfig

    found: dict[str, Any] = MlpPolicyConfig.from_pretrained(path).to_dict()
    return found


def refuse_control_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """ConfigError where model.path is a policy of actions and the rest of the recipe is not, or the other way round."""
    kind = job.task.env_kind
    if not is_control(job.model.path):
        if kind == "control":
            raise ConfigError(
                f'task.env = "control" with model.path = {job.model.path!r}, which draws no actions: take '
                f'{{ random = "{MLP_POLICY}" }}, or the folder of a trained one',
                page=PAGE,
            )
        return
    world = job.task.data.get("kind") == "gym" or kind not in ENV_TABLES
    rules = [
        (kind == "control" or kind not in ENV_TABLES, f'task.env = "{kind}" reads text: set task.env = "control"'),
        (world, 'task.env = "control" plays worlds: set task.data = { kind = "gym", name = "CartPole-v1", n = 100 }'),
        (not job.task.episode.budget.model_fields_set, "task.env.budget counts text: set task.env.turns"),
        (not job.loop.warmup.steps, "loop.warmup copies answers of the data set, and worlds have none: leave it out"),
        (not job.algo.guides and not job.algo.beside, "there are no demonstrations of actions: leave them out"),
        (
            job.trainer.critic.path is None,
            "trainer.critic.path: its critic begins as a copy of the policy; leave it out",
        ),
        *refusals_of_steps(job, rows, "a policy of actions", has_critic=True, learns_noise=True),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"model.path is a policy of actions, and {rule}", page=PAGE)
    if isinstance(job.model.path, dict) and (width := job.model.path.get("hidden_size", WIDTH)) % WIDTH:
        raise ModelError(f"hidden_size = {width} of model.path: take a multiple of {WIDTH}")
    try:
        refuse_sampling(sampling)
    except UserError as error:
        raise ConfigError(f"engine.{error}", page=PAGE) from error
