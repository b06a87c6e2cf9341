"""Weights in a number format: the layers' matrices hold what the format decodes to; masters hold the whole numbers.

    load     W -> decode(encode(W)), in place, in engine, trainer and reference alike; a trainer's masters begin as W
    step     the masters move; compute weights = decode(encode(masters)): the gradient of the one is that of the other
             (quantisation-aware training, straight through; INT4 QAT, FP8 on both sides)

What it is applied to: the matrices of linear layers and of joined experts. Embeddings, the head, norms, biases,
routers and towers that look at pictures stay as they are. Blocks run along what a product sums over, whichever way a
model lays it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ConfigError
from rondel.formats import format_of
from rondel.models.expert_parallel import routed_experts
from rondel.models.rounded_weights import WeightFormat, round_weight
from rondel.models.vision_families import tower_parts

MARK = "rondel_number_format"  # in a config: what the matrices of the layers are rounded to


def formatted_parameters(model: Any) -> dict[str, bool]:
    """Names of the parameters that a format is applied to -> whether they lie transposed."""
    towers = {m for part in tower_parts(model) for m in part.modules()}
    but = {model.get_output_embeddings(), *towers}
    found = {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in but
    }
    for name, experts in routed_experts(model).items():
        for own, parameter in experts.named_parameters(recurse=False):
            if parameter.ndim == 3:
                found[f"{name}.{own}"] = bool(getattr(experts, "is_transposed", False))
    return found


def apply_format(model: Any, name: str) -> None:
    """Round the matrices of its layers in place, and say so in its config; a checkpoint that says so is rounded
    already: in 16 bits a second time would not find the same scales.
    """
    form, parameters = format_of(name), dict(model.named_parameters())
    if not (chosen := formatted_parameters(model)):
        raise ConfigError(f'the model has no linear layers to hold in {name}: leave model.format = "{name}" out')
    done = getattr(model.config, MARK, None) == name
    for own, transposed in chosen.items():
        round_weight(parameters[own], WeightFormat(form, transposed), done=done)
    setattr(model.config, MARK, name)


def forget_format(model: Any) -> None:
    """Of a model that was rounded once and is trained on whole."""
    if hasattr(model.config, MARK):
        delattr(model.config, MARK)
