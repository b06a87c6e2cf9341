"""Weights in a number format: the matrices of the layers hold what the format decodes to; masters hold the whole numbers.

    load     W -> decode(encode(W)), in place, in engine, trainer and reference alike; a trainer's masters begin as W
    step     the masters move; compute weights = decode(encode(masters)): the gradient of the one is that of the other
             (quantisation-aware training, straight through; INT4 QAT, FP8 on both sides)

What it is applied to: the matrices of linear layers and of joined experts. Embeddings, the head, norms, biases, routers and
towers that look at pictures stay as they are. Blocks run along what a product sums over, whichever way a model lays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ConfigError
from rondel.formats import NumberFormat
from rondel.models.expert_parallel import routed_experts
from rondel.models.loaded_model import LoadedModel
from rondel.models.vision_families import tower_parts


@dataclass(frozen=True)
class WeightFormat:
    """How one parameter is rounded: [..., O, I], or `transposed` [..., I, O]."""

    form: NumberFormat
    transposed: bool = False

    def fake(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """What the format decodes `weight` to, in the parameter's own layout."""
        if not self.transposed:
            return self.form.decode(self.form.encode(weight), dtype)
        return self.form.decode(self.form.encode(weight.mT.contiguous()), dtype).mT


_formats: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> WeightFormat
_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its numbers before they were rounded


def weight_format(parameter: Tensor) -> WeightFormat | None:
    """Of a parameter that `apply_format` rounded."""
    return _formats.get(parameter)


def take_whole(parameter: Tensor) -> Tensor:
    """The numbers from which a parameter was rounded, once; later its own."""
    return _whole.pop(parameter, parameter)


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


@torch.no_grad()
def apply_format(loaded: LoadedModel, form: NumberFormat) -> None:
    """Round the matrices of its layers in place; their whole numbers are kept until `take_whole` asks, or `forget_whole`."""
    parameters = dict(loaded.model.named_parameters())
    if not (chosen := formatted_parameters(loaded.model)):
        raise ConfigError(f"'{loaded.name}' has no linear layers to hold in {form.name}: leave model.format out")
    for name, transposed in chosen.items():
        parameter = parameters[name]
        _formats[parameter] = found = WeightFormat(form, transposed)
        _whole[parameter] = parameter.detach().clone()
        parameter.copy_(found.fake(parameter, parameter.dtype))


def forget_whole(model: nn.Module) -> None:
    """Where nothing is trained."""
    for parameter in model.parameters():
        _whole.pop(parameter, None)
