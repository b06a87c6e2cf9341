"""What a recipe of a policy of points or actions cannot have: what is about tokens, and what has not been carried over
to them yet.
"""

from __future__ import annotations

from rondel.assemble.rows import AlgorithmRows
from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, ModelError, UserError
from rondel.core.types import Sampling
from rondel.generate.engine.control.action_request import refuse_sampling as refuse_action_sampling
from rondel.generate.engine.flow.chain import refuse_sampling
from rondel.models.control.kinds import MLP_POLICY, is_control
from rondel.models.flow.kinds import is_flow

ABOUT_TOKENS = {  # what a row may need that only a vocabulary has
    "teacher_logprobs": "a teacher",
    "teacher_hidden": "a teacher",
    "values": "a critic",
    "behavior_top": "the likeliest tokens of every draw",
    "collisions": "the whole vocabulary at every draw",
    "guidance": "demonstrations among the samples",
}
PAGE = "docs/control.md"
WIDTH = 16  # a multiple of which a layer's width is: elementwise functions then give a row the same bits in every batch
Rules = list[tuple[bool, str]]


def refuse_flow_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """ConfigError where model.path is a flow and the rest of the recipe is not, or the other way round."""
    kind = job.task.env_kind
    if not is_flow(job.model.path):
        if kind == "flow":
            raise ConfigError(
                f'task.env = "flow" with model.path = {job.model.path!r}, which writes tokens: take a flow, '
                '{ random = "flow_mlp" } or "flow_dit", or the folder of a trained one'
            )
        return
    rules = [
        (kind == "flow" or kind not in ENV_TABLES, f'task.env = "{kind}" reads text: set task.env = "flow"'),
        *refusals_of_steps(job, rows, "a flow"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"model.path is a flow, and {rule}", page="docs/flows.md")
    try:
        refuse_sampling(sampling)
    except UserError as error:
        raise ConfigError(f"engine.{error}", page="docs/flows.md") from error


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
        refuse_action_sampling(sampling)
    except UserError as error:
        raise ConfigError(f"engine.{error}", page=PAGE) from error


def refusals_of_steps(
    job: Job, rows: AlgorithmRows, what: str, *, has_critic: bool = False, learns_noise: bool = False
) -> Rules:
    """(whether it holds, the rule) of every policy that draws no tokens.

    learns_noise  whether the weights move its entropy
    """
    mesh = job.place.mesh.to_mesh(job.place.ranks)
    rules = [
        (job.engine.kind == "builtin", f'engine.kind = "{job.engine.kind}" serves tokens: leave it out'),
        (job.engine.numerics == "fast", f'engine.numerics = "{job.engine.numerics}" is about tokens: leave it out'),
        (not job.engine.compile, "engine.compile = true is about tokens: leave it out"),
        (job.engine.speculative.kind == "off", "engine.speculative guesses tokens: leave it out"),
        (job.engine.concurrency == "fixed", f'engine.concurrency = "auto" watches a cache, and {what} has none'),
        (job.model.adapter.kind == "off", "model.adapter goes on language models: leave it out"),
        (job.model.format == "none", "model.format is for language models: leave it out"),
        (not job.policies, "policies play agents that write text: leave them out"),
        (mesh.world == 1, f"place.ranks = {mesh.world}: {what} is trained by one rank"),
        (job.place.engine_processes == 1, "an engine of several processes splits a language model: use one"),
        (not job.run.record, "run.record replays caches of tokens: leave it out"),
        (not job.trainer.memory.offload, f"trainer.memory.offload makes room for a cache, and {what} has none"),
    ]
    odd = {need: told for need, told in ABOUT_TOKENS.items() if not (has_critic and need == "values")}
    instead = "ppo or grpo" if has_critic else "flow_grpo, ddrl or grpo"
    for row in rows.all_rows:
        needs = sorted({told for need, told in odd.items() if need in row.needs})
        rules.append((not needs, f"algo.kind = '{row.name}' needs {', '.join(needs)}: use {instead}"))
        if not learns_noise:
            rules.append(
                (
                    not row.entropy.coef,
                    f"algo.entropy.coef = {row.entropy.coef:g}: the noise of a step is set, not learned",
                )
            )
    return rules
