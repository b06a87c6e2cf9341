"""What a recipe of a policy of points, actions or blocks cannot have: what is about text that is written token after
token, and what has not been carried over yet.
"""

from __future__ import annotations

from rondel.assemble.rows import AlgorithmRows
from rondel.core.config.engine import SamplingConfig
from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.job import Job
from rondel.core.config.section import split_kind
from rondel.core.config.task import TaskConfig
from rondel.core.errors import ConfigError, DataError, ModelError, UserError
from rondel.core.mesh import AXES
from rondel.core.transitions import OBSERVED, PREDICTED
from rondel.core.types import Sampling, Task
from rondel.generate.engine.blocks.block_sequence import WHAT as BLOCKS
from rondel.generate.engine.control.action_request import WHAT as ACTIONS
from rondel.generate.engine.flow.chain import WHAT as POINTS
from rondel.generate.engine.stepwise.answer import refuse_sampling
from rondel.generate.envs.points import find_points
from rondel.models.block_diffusion.settings import has_blocks
from rondel.models.control.kinds import (
    FLOW_POLICY,
    FLOW_VLA,
    MLP_POLICY,
    MLP_WORLD,
    draws_chunks,
    is_control,
    is_world_model,
    reads_pictures,
)
from rondel.models.flow.kinds import FLOW_MLP, is_flow
from rondel.models.load import tokenizer_of
from rondel.models.model_type import model_settings, model_type_of

NEXT_TOKEN = {  # what a row may need that is computed of the next token, for every token
    "teacher_logprobs": "a teacher",
    "teacher_hidden": "a teacher",
    "criterion_margins": "hints at criteria",
    "values": "a critic",
    "behavior_top": "the likeliest tokens of every draw",
    "collisions": "the whole vocabulary at every draw",
    "guidance": "demonstrations among the samples",
}
WIDTH = 16  # a multiple of which a layer's width is: elementwise functions then give a row the same bits in every batch
Rules = list[tuple[bool, str]]


def refuse_flow_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """ConfigError where model.path is a flow and the rest of the recipe is not, or the other way round."""
    kind, mesh = job.task.env_kind, job.place.mesh
    closed = any("ref_means" in row.needs for row in rows.all_rows)
    if not is_flow(job.model.path):
        if closed:
            raise ConfigError(
                'algo.kl.kind = "closed_form" is of the Gaussian steps of a flow, and model.path is none: use k1, '
                "k2 or k3",
                page="docs/flows.md",
            )
        if kind == "flow":
            raise ConfigError(
                f'task.env = "flow" with model.path = {job.model.path!r}, which writes tokens: take a flow, '
                '{ random = "flow_mlp" } or "flow_dit", or the folder of a trained one'
            )
        return
    rules = [
        (kind == "flow" or kind not in ENV_TABLES, f'task.env = "{kind}" reads text: set task.env = "flow"'),
        (
            not job.task.episode.budget.model_fields_set,
            "task.env.budget counts text, of a flow it would be denoising steps: set engine.sampling.max_tokens",
        ),
        *refusals_of_steps(
            job, rows, "flow_grpo, ddrl or grpo", densities=True, axes=("replicas", "shards", "cp", "tp")
        ),
        (mesh.cp_attention != "ring", "keys and values of its patches are gathered over cp: leave cp_attention out"),
        (
            mesh.cp == 1 or model_type_of(job.model.path) != FLOW_MLP,
            f"place.mesh has cp = {mesh.cp}: a {FLOW_MLP} has no tokens that ranks could share; leave cp out",
        ),
        (
            mesh.tp == 1 or model_type_of(job.model.path) != FLOW_MLP,
            f"place.mesh has tp = {mesh.tp}: a {FLOW_MLP} has no attention heads that ranks could share; leave tp out",
        ),
        (
            not mesh.overlap,
            "place.mesh.overlap is of rows that go round a ring, and those of a flow are gathered: leave overlap out",
        ),
        (
            mesh.cp == 1 or not closed,
            'algo.kl.kind = "closed_form" compares whole points, which the ranks of cp cut up: use k3, or leave cp out',
        ),
    ]
    refuse_first(rules, "model.path is a flow", sampling, POINTS, "docs/flows.md")


def refuse_control_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """ConfigError where model.path is a policy of actions and the rest of the recipe is not, or the other way round."""
    kind = job.task.env_kind
    if is_world_model(job.model.path):
        raise ConfigError(
            "model.path is a model of a world, which takes no actions of its own: take "
            f'{{ random = "{MLP_POLICY}" }}, and name it in [policies.world]',
            page="docs/worlds.md",
        )
    world = job.task.data.get("kind") == "gym" or kind not in ENV_TABLES
    plays = (
        world,
        'task.env = "control" plays worlds: set task.data = { kind = "gym", name = "CartPole-v1", n = 100 }',
    )
    pays = (
        kind != "control" or job.task.reward == TaskConfig.model_fields["reward"].default,
        "the world pays for its actions: leave task.reward out, or wrap the world",
    )
    cut = _time_limit_rules(job, rows) if kind == "control" else []
    if writes_actions(job):
        writes = (
            not is_control(job.model.path),
            "the model draws arrays: leave it out, or take a model that writes text",
        )
        frames = job.task.env_settings.get("frames") and not is_control(job.model.path)
        looks = (
            not frames or tokenizer_of(job.model.path)[2] is not None,
            "task.env.frames shows pictures to a model of text alone: leave it out, or take one that looks, as in "
            "recipes/vision.toml",
        )
        refuse_first(
            [writes, plays, looks, pays, *cut], 'task.env.actions = "tokens"', Sampling(), ACTIONS, "docs/control.md"
        )
        return
    if not is_control(job.model.path):
        if kind == "control":
            raise ConfigError(
                f'task.env = "control" with model.path = {job.model.path!r}, which draws no actions: take '
                f'{{ random = "{MLP_POLICY}" }}, or the folder of a trained one, or set task.env.actions = "tokens"',
                page="docs/control.md",
            )
        return
    rules = [
        (kind == "control" or kind not in ENV_TABLES, f'task.env = "{kind}" reads text: set task.env = "control"'),
        plays,
        pays,
        *cut,
        (not job.task.episode.budget.model_fields_set, "task.env.budget counts text: set task.env.turns"),
        (
            kind != "control"
            or job.engine.sampling.max_tokens in (1, SamplingConfig.model_fields["max_tokens"].default),
            "engine.sampling.max_tokens has no effect, for it draws one action or chunk at a time: leave it out. "
            "task.env.turns says how long an episode may be",
        ),
        (
            job.task.system is None or reads_pictures(job.model.path),
            "task.system is text, and this one reads numbers: leave it out",
        ),
        *picture_rules(job),
        (
            not job.loop.warmup.steps or bool(job.task.env_settings.get("expert")),
            "loop.warmup copies answers of the data set, and worlds have none: name a controller in task.env.expert, "
            "or leave it out",
        ),
        (
            draws_chunks(job.model.path) or not job.task.env_settings.get("expert"),
            f"task.env.expert is copied by flow matching: take {FLOW_POLICY} or {FLOW_VLA}, or leave it out",
        ),
        (not job.algo.guides and not job.algo.beside, "there are no demonstrations of actions: leave them out"),
        (
            job.trainer.critic.path is None,
            "trainer.critic.path: its critic begins as a copy of the policy; leave it out",
        ),
        *refusals_of_steps(
            job,
            rows,
            "ppo or grpo",
            has_critic=True,
            learns_noise=not draws_chunks(job.model.path),
            others=model_of_world(job) is not None,
            densities=draws_chunks(job.model.path) or not model_settings(job.model.path).get("discrete", True),
        ),
    ]
    refuse_first(rules, "model.path is a policy of actions", sampling, ACTIONS, "docs/control.md")
    models = {"model.path": job.model.path} | {f"policies.{name}.model": p.model for name, p in job.policies.items()}
    for key, path in models.items():
        if isinstance(path, dict) and (width := path.get("hidden_size", WIDTH)) % WIDTH:
            raise ModelError(f"hidden_size = {width} of {key}: take a multiple of {WIDTH}")
    table = job.model.path if isinstance(job.model.path, dict) else {}
    for name in ("chunk", "denoising_steps"):
        if not isinstance(n := table.get(name, 1), int) or n < 1:
            raise ModelError(f"{name} = {n!r} of model.path: take a whole number of at least 1")


def picture_rules(job: Job) -> Rules:
    """Of a policy that reads a picture and an instruction, and of all that do not."""
    told, looks = job.task.env_settings, reads_pictures(job.model.path)
    if not looks:
        odd = [name for name in ("frames", "instruction") if told.get(name)]
        return [
            (not odd, f"task.env.{odd[0] if odd else ''} is of {FLOW_VLA}, and this one reads numbers: leave it out")
        ]
    return [
        (bool(told.get("frames")), f"a {FLOW_VLA} reads pictures: set task.env.frames = true"),
        (
            bool(told.get("instruction")),
            f'a {FLOW_VLA} reads an instruction: set task.env.instruction = "catch the ball"',
        ),
        (
            job.model.vision.image_tokens == "auto",
            "model.vision.image_tokens scales pictures of conversations: set task.env.pixels",
        ),
    ]


def _time_limit_rules(job: Job, rows: AlgorithmRows) -> Rules:
    """What leaves out answers that ran out of room is not for episodes that a time limit ends."""
    why = (
        "leaves out answers that ran out of room, and an episode that goes on until its world or task.env.turns cuts "
        "it off is often the best: leave it out"
    )
    given = [*job.task.filters, *(name for row in rows.all_rows for name in row.filters)]
    filters = [split_kind(entry, "")[0] for entry in given]
    return [
        (not any(row.mask_truncated for row in rows.all_rows), f"algo.mask_truncated {why}"),
        ("truncated" not in filters, f'the filter "truncated" {why}'),
    ]


def refuse_other_points(tasks: list[Task], drawn: int) -> None:
    """Points to learn from of another size than those that the policy draws."""
    sets = {repr(told): told for task in tasks if isinstance(told := task.data.get("points"), dict)} if drawn else {}
    for told in sets.values():
        found = {own.shape[1] for own in find_points(told["name"], told["args"]).values()}
        if odd := found - {drawn}:
            raise DataError(
                f"points of '{told['name']}' have {min(odd)} numbers, and the flow of model.path draws {drawn}: give it "
                "as many (`dim`; of a video frames, height, width and channels), or take other points"
            )


def writes_actions(job: Job) -> bool:
    """Whether the numbers of actions are written, as text."""
    return job.task.env_kind == "control" and job.task.env_settings.get("actions") == "tokens"


def model_of_world(job: Job) -> str | None:
    """The policy that is a model of the world, by task.env.model."""
    told = job.task.env_settings.get("model") if job.task.env_kind == "control" else None
    return str(told.get("policy", "world")) if isinstance(told, dict) else None


def refuse_world_model(job: Job, rows: AlgorithmRows) -> None:
    """ConfigError where a model of a world and what imagines with it do not fit."""
    name, models = model_of_world(job), [n for n, p in job.policies.items() if is_world_model(p.model or "")]
    if name is None:
        if models:
            raise ConfigError(
                f"policies.{models[0]} is a model of a world, and nothing is imagined with it: set task.env = "
                f'{{ kind = "control", model = {{ policy = "{models[0]}" }} }}',
                page="docs/worlds.md",
            )
        return
    agents = [OBSERVED, PREDICTED]
    table = f'[policies.{name}] model = {{ random = "{MLP_WORLD}" }}, agents = {agents}'.replace("'", '"')
    rules = [
        (
            not draws_chunks(job.model.path),
            f'model.path draws chunks of actions: take {{ random = "{MLP_POLICY}" }}, or leave task.env.model out',
        ),
        (name in models, f"this policy is no model of a world: set {table}"),
        (list(job.policies) == [name], f"others have weights of their own beside it: leave only {name}"),
        (
            name not in job.policies or sorted(job.policies[name].agents) == agents,
            f"it plays other agents than those of a model: set policies.{name}.agents = {table.rpartition('= ')[2]}",
        ),
        (
            "values" in rows.needs,
            f"algo.kind = '{rows.main.name}' has no critic, without which an episode that is cut off after a few steps "
            "is worth what it earned in them: use ppo",
        ),
        (not job.loop.replays.groups, "loop.replays brings back whole groups: use task.env.model.memory"),
        (
            job.engine.sampling.temperature == 1.0,
            "a model is learned at temperature 1: leave engine.sampling.temperature out",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f'task.env.model = "{name}", and {rule}', page="docs/worlds.md")


def refuse_block_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """ConfigError where model.path fills in blocks of masks, and the rest of the recipe cannot."""
    if not has_blocks(job.model.path):
        return
    kind = job.task.env_kind
    rules = [
        (
            kind == "single_turn" or kind not in ENV_TABLES,
            f'task.env = "{kind}" takes several turns, or other answers: set task.env = "single_turn"',
        ),
        ("sources" not in job.task.data, "task.data.sources may name other environments: leave them out"),
        (
            job.trainer.static_shapes is None,
            "trainer.micro_tokens as a table fixes shapes of other rows: give a number",
        ),
        *refusals_of_steps(job, rows, "grpo, dapo or gspo", numerics=("fast", "aligned"), learns_noise=True),
    ]
    refuse_first(rules, "model.path fills in blocks of masks", sampling, BLOCKS, "docs/blocks.md")


def refuse_first(rules: Rules, fact: str, sampling: Sampling, what: str, page: str) -> None:
    """ConfigError of the first rule that does not hold, or of a setting of sampling."""
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"{fact}, and {rule}", page=page)
    try:
        refuse_sampling(sampling, what)
    except UserError as error:
        raise ConfigError(f"engine.{error}", page=page) from error


def refusals_of_steps(
    job: Job,
    rows: AlgorithmRows,
    instead: str,
    *,
    numerics: tuple[str, ...] = ("fast",),
    has_critic: bool = False,
    learns_noise: bool = False,
    others: bool = False,
    densities: bool = False,
    axes: tuple[str, ...] = (),
) -> Rules:
    """(whether it holds, the rule) of every policy that does not write token after token.

    instead       rows of algorithms that it can have
    learns_noise  whether the weights move its entropy
    others        whether other policies may stand beside it
    densities     whether it draws numbers, whose log-densities may be above 0
    axes          of place.mesh along which its trainer may have several ranks
    """
    mesh = job.place.mesh.to_mesh(job.place.ranks)
    cut = [axis for axis in (*AXES, "ep") if axis not in axes and getattr(mesh, axis) > 1]
    rules = [
        (job.engine.kind == "builtin", f'engine.kind = "{job.engine.kind}" writes token after token: leave it out'),
        (
            job.engine.numerics in numerics,
            f'engine.numerics = "{job.engine.numerics}" is not carried over: leave it out',
        ),
        (not job.engine.compile, "engine.compile compiles the pass of one more token: leave it out"),
        (job.engine.speculative.kind == "off", "engine.speculative guesses the next tokens: leave it out"),
        (
            job.engine.concurrency == "fixed",
            'engine.concurrency = "auto" watches the pages of a cache, and there are none',
        ),
        (job.model.adapter.kind == "off", "model.adapter is not carried over: leave it out"),
        (job.model.engine_format == "none", "model.format is not carried over: leave it out"),
        (others or not job.policies, "policies are not carried over: leave them out"),
        (mesh.world == 1 or bool(axes), f"place.ranks = {mesh.world}: it is trained by one rank"),
        (
            not cut,
            f"place.mesh = {mesh}: it is trained in {', '.join(axes)}; leave {' and '.join(cut)} out",
        ),
        (job.place.engine_processes == 1, "an engine of several processes splits a model with a cache: use one"),
        (
            not job.trainer.memory.offload,
            "trainer.memory.offload makes room for the pages of a cache, and there are none",
        ),
    ]
    odd = {need: told for need, told in NEXT_TOKEN.items() if not (has_critic and need == "values")}
    for row in rows.all_rows:
        needs = sorted({told for need, told in odd.items() if need in row.needs})
        needs += ["the whole vocabulary at temperature 1"] * row.surrogate.whole_distribution
        rules.append((not needs, f"algo.kind = '{row.name}' needs {', '.join(needs)}: use {instead}"))
        reads = [family for family, part in row.parts.items() if part.probability] if densities else []
        rules.append(
            (
                not reads,
                f"algo.{', '.join(reads)} of '{row.name}' compares probabilities of a token, and numbers have "
                f"densities, which are none: use {instead}",
            )
        )
        if not learns_noise:
            rules.append(
                (
                    not row.entropy.coef,
                    f"algo.entropy.coef = {row.entropy.coef:g}: the noise of a step is set, not learned",
                )
            )
    return rules
