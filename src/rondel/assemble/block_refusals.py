"""What a recipe of a block-diffusion model cannot have: what belongs to text that is written token after token."""

from __future__ import annotations

from rondel.assemble.rows import AlgorithmRows
from rondel.core.config.environment import ENV_TABLES
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, UserError
from rondel.core.types import Sampling
from rondel.generate.engine.blocks.block_sequence import refuse_sampling
from rondel.models.block_diffusion.settings import has_blocks

NEXT_TOKEN = {  # what a row may need that is computed of the next token, for every token
    "teacher_logprobs": "a teacher",
    "teacher_hidden": "a teacher",
    "values": "a critic",
    "behavior_top": "the likeliest tokens of every draw",
    "collisions": "the whole vocabulary at every draw",
    "guidance": "demonstrations among the samples",
}


def refuse_block_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """ConfigError where model.path fills in blocks of masks, and the rest of the recipe cannot."""
    if not has_blocks(job.model.path):
        return
    kind, mesh = job.task.env_kind, job.place.mesh.to_mesh(job.place.ranks)
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
        (job.engine.kind == "builtin", f'engine.kind = "{job.engine.kind}" writes token after token: leave it out'),
        (job.engine.numerics != "rounded", 'engine.numerics = "rounded" is not carried over: leave it out'),
        (not job.engine.compile, "engine.compile compiles the pass of one more token: leave it out"),
        (job.engine.speculative.kind == "off", "engine.speculative guesses the next tokens: leave it out"),
        (job.engine.concurrency == "fixed", 'engine.concurrency = "auto" watches a cache, and there is none'),
        (job.model.adapter.kind == "off", "model.adapter is not carried over: leave it out"),
        (job.model.format == "none", "model.format is not carried over: leave it out"),
        (not job.policies, "policies are not carried over: leave them out"),
        (mesh.world == 1, f"place.ranks = {mesh.world}: it is trained by one rank"),
        (job.place.engine_processes == 1, "an engine of several processes splits a model with a cache: use one"),
        (not job.run.record, "run.record replays caches of tokens: leave it out"),
        (not job.trainer.memory.offload, "trainer.memory.offload makes room for a cache, and there is none"),
    ]
    for row in rows.all_rows:
        needs = sorted({what for need, what in NEXT_TOKEN.items() if need in row.needs})
        rules.append((not needs, f"algo.kind = '{row.name}' needs {', '.join(needs)}: use grpo, dapo or gspo"))
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"model.path fills in blocks of masks, and {rule}", page="docs/blocks.md")
    try:
        refuse_sampling(sampling)
    except UserError as error:
        raise ConfigError(f"engine.{error}", page="docs/blocks.md") from error
