"""Weights in a number format: the layers' matrices hold what the format decodes to; masters hold the whole numbers.

    load     W -> decode(encode(W)), in place, in engine, trainer and reference alike; a trainer's masters begin as W
    step     the masters move; compute weights = decode(encode(masters)): the gradient of the one is that of the other
             (quantisation-aware training, straight through; INT4 QAT, FP8 on both sides)

    rollouts only   the engine rounds, the trainer computes with whole weights, which travel encoded

What it is applied to: the matrices of linear layers and of joined experts. Embeddings, the head, norms, biases,
routers and towers that look at pictures stay as they are. Blocks run along what a product sums over, whichever way a
model lays it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ConfigError
from rondel.formats import format_of
from rondel.models.encoded_linear import hold_encoded
from rondel.models.encoded_weights import EncodedWeights
from rondel.models.expert_parallel import routed_experts
from rondel.models.names import send_encoded
from rondel.models.rounded_weights import WeightFormat, round_weight, take_whole
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


def formats_of(model: Any, name: str) -> dict[str, WeightFormat]:
    """How each of these parameters is rounded to the format."""
    form = format_of(name)
    chosen = {own: WeightFormat(form, transposed) for own, transposed in formatted_parameters(model).items()}
    if not chosen:
        raise ConfigError(f'the model has no linear layers to hold in {name}: leave model.format = "{name}" out')
    return chosen


def apply_format(model: Any, name: str, *, travels: bool = True) -> None:
    """Round the matrices of its layers in place, and say so in its config; a checkpoint that says so is rounded
    already: in 16 bits a second time would not find the same scales. `travels`: to an engine with a module of its own.
    """
    parameters, chosen = dict(model.named_parameters()), formats_of(model, name)
    done = getattr(model.config, MARK, None) == name
    for own, form in chosen.items():
        round_weight(parameters[own], form, done=done)
    setattr(model.config, MARK, name)
    if travels:
        send_encoded(model, EncodedWeights(chosen))


@torch.no_grad()
def apply_rollout_format(model: Any, name: str) -> None:
    """Round the matrices of an engine's layers in place, where the trainer's stay whole."""
    parameters, chosen = dict(model.named_parameters()), formats_of(model, name)
    for own, form in chosen.items():
        parameters[own].copy_(form.fake(parameters[own], parameters[own].dtype))
    send_encoded(model, EncodedWeights(chosen))


@torch.no_grad()
def hold_format(model: Any, name: str) -> None:
    """The same of an engine that keeps codes and scales of its linear layers, and decodes them for each product;
    experts and transposed layers are rounded in place.
    """
    parameters, chosen = dict(model.named_parameters()), formats_of(model, name)
    wholes = {own: take_whole(parameters[own]) for own in chosen}
    for own in hold_encoded(model, {own: (form, wholes[own]) for own, form in chosen.items()}):
        parameters[own].copy_(chosen[own].fake(wholes[own], parameters[own].dtype))
    send_encoded(model, EncodedWeights(chosen))


def send_rollout_format(model: Any, name: str) -> None:
    """The trainer's side: its weights stay whole, and travel encoded."""
    send_encoded(model, EncodedWeights(formats_of(model, name)))


def forget_format(model: Any) -> None:
    """Of a model that was rounded once and is trained on whole."""
    if hasattr(model.config, MARK):
        delattr(model.config, MARK)
