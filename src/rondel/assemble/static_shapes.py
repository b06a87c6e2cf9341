"""Fixed shapes of a recipe: what they are, and what cannot have them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rondel.core.errors import ConfigError
from rondel.train.shape_buckets import ShapeBucket, buckets_upto

if TYPE_CHECKING:
    from rondel.core.config.job import Job
    from rondel.core.types import Sampling
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.settings import TrainSettings

PAGE = "docs/train.md#static-shapes"
BEYOND = {  # what a row may need that has passes of its own
    "values": "a critic",
    "teacher_logprobs": "a teacher",
    "teacher_hidden": "the whole distribution of a teacher",
    "behavior_top": "the likeliest tokens of every draw",
    "criterion_margins": "hints at criteria",
}


def with_static_shapes(
    settings: TrainSettings, job: Job, sampling: Sampling, loaded: LoadedModel, needs: frozenset[str]
) -> TrainSettings:
    """The same with the shapes of a recipe. ConfigError where the rest of it has shapes that depend on data."""
    given = job.trainer.static_shapes
    assert given is not None
    refuse_static_shapes(job, sampling, loaded, needs)
    _ = given.targets, given.most  # read
    if given.buckets == "auto":
        shapes = buckets_upto(settings.micro_tokens)
    else:
        targets = given.buckets if given.targets == "auto" else given.targets
        shapes = tuple(ShapeBucket(*pair) for pair in sorted(zip(given.buckets, targets)))
    return replace(
        settings,
        shapes=shapes,
        shapes_grow=given.buckets == "auto",
        compile_passes=given.compile,
        micro_tokens=max(shape.tokens for shape in shapes),
    )


def refuse_static_shapes(job: Job, sampling: Sampling, loaded: LoadedModel, needs: frozenset[str]) -> None:
    """Whatever has shapes or branches that depend on numbers, each with its reason."""
    given = job.trainer.static_shapes
    assert given is not None
    found = sorted(what for need, what in BEYOND.items() if need in needs)
    mesh = job.place.mesh.to_mesh(job.place.ranks)
    rules = [
        (loaded.routers == 0, "a mixture of experts sends each of them another number of tokens in every pass"),
        (loaded.sight is None, "pictures have sizes of their own"),
        (loaded.state_bytes == 0, "recurrent layers batch segments by their lengths"),
        (loaded.indexers == 0 and not loaded.compressed, "attention to chosen or compressed keys depends on scores"),
        (hasattr(loaded.head, "logits"), "a flow draws points, whose passes are its own"),
        (not loaded.aligned, 'engine.numerics = "aligned" lets each query attend alone: set "fast"'),
        (
            not sampling.truncates_support,
            "top_k, top_p and min_p leave each draw another number of tokens: set 0, 1 and 0",
        ),
        (not found, f"algo.kind = '{job.algo.kind}' needs {', '.join(found)}"),
        (mesh.world == 1, f"place.ranks = {mesh.world}: ranks share micro-batches by length; use one"),
        (job.engine.speculative.kind != "draft", "a draft model is trained in passes of its own"),
        (
            not given.compile or str(loaded.dtype) != "torch.float16",
            "compile computes gradients before float16 can scale them: use bfloat16 or float32",
        ),
        (
            not given.compile or job.trainer.memory.recompute == "none",
            "compile decides itself what is kept for the backward pass: leave memory.recompute out",
        ),
        (
            given.compile != "record" or loaded.device.type == "cuda",
            f'compile = "record" makes CUDA graphs, and the trainer computes on {loaded.device}: take true or false',
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"trainer.micro_tokens is a table of fixed shapes, and {rule}", page=PAGE)
