"""Layers of Megatron-Core (place.mesh.layers) beside settings that do not go with them: each is refused by name."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rondel.core.errors import ConfigError

if TYPE_CHECKING:
    from rondel.core.config.job import Job

PAGE = "docs/place.md#layers-of-megatron-core"


def refuse_layers(job: Job) -> None:
    """Whatever Megatron-Core's layers cannot be used with, each with its remedy. What depends on the model is refused
    once that is known (models/megatron/layers.py).
    """
    mesh = job.place.mesh
    if mesh.layers != "megatron":
        return
    form = job.model.trained_format
    rules = [
        (
            importlib.util.find_spec("megatron") is not None,
            "needs the package megatron-core, which is not installed: pip install 'rondel[megatron]'",
        ),
        (job.model.adapter.kind == "off", "joins whole matrices, and an adapter lies beside each: drop model.adapter"),
        (form == "none", f'joins matrices as they are, and model.format = "{form}" rounds them: drop it'),
        (
            job.engine.numerics != "aligned",
            'multiplies in an order of its own: set engine.numerics = "fast"',
        ),
        (mesh.ep == 1, f"keeps all experts of a layer on a rank, and ep = {mesh.ep}: use shards, cp or pp"),
        (not mesh.overlap, "has sums of its own, which rows do not pass round a ring: leave overlap out"),
        (mesh.tp == 1 or not mesh.sp, "sums whole rows between the parts of a layer: set sp = false beside tp"),
        (
            job.trainer.memory.recompute != "mlp",
            'has no feed-forward part of its own to compute again: set trainer.memory.recompute = "layers"',
        ),
        (job.trainer.static_shapes is None, "takes rows of any length: give trainer.micro_tokens a number"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f'place.mesh.layers = "megatron" {rule}', page=PAGE)
