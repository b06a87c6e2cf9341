"""A linear layer of an engine whose weight lies as codes and scales: decoded for a product and let go.

    W [O, I] as parts of a number format (rondel/formats) ── decode ──> W in the dtype of x ── x Wᵀ + b

The memory of a weight is that of the format; a pass reads the parts, writes W and reads it again. The product is that
of a layer that holds W, so what is drawn is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rondel.core.errors import ModelError
from rondel.models import linear
from rondel.models.rounded_weights import WeightFormat

PART = "encoded_"  # how the names of its buffers begin


class EncodedLinear(nn.Linear):
    """y = W x + b, W [O, I] as `parts`; nothing is trained here."""

    def __init__(self, form: WeightFormat, parts: Mapping[str, Tensor], layer: nn.Linear) -> None:
        """In the place of `layer`, of whose weight these are the parts."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        self.dtype = layer.weight.dtype
        self.register_parameter("bias", layer.bias)
        for name, part in parts.items():
            self.register_buffer(PART + name, part, persistent=False)

    @property
    def parts(self) -> dict[str, Tensor]:
        return {name.removeprefix(PART): part for name, part in self._buffers.items() if part is not None}

    def set_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Others of the same shapes, in the same tensors: who counts or moves them has these."""
        for name, part in parts.items():
            self.get_buffer(PART + name).data = part

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W [O, I] in the model's dtype, a fresh tensor."""
        return self.form.decode(self.parts, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if linear.is_tracing():
            return linear.call_joint_product(self, x, self.out_features)
        return self.forward_joined(x)

    def forward_joined(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]"""
        weight = self.weight
        return linear.product(linear.as_factor(x, weight), weight, self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, encoded"


@torch.no_grad()
def hold_encoded(model: Any, chosen: Mapping[str, tuple[WeightFormat, Tensor]]) -> set[str]:
    """Put an EncodedLinear in the place of each linear layer that holds one of these weights: how it is encoded, and
    from what, by the parameter's name. -> names of those that are not in a plain linear layer, and stay as they are.
    """
    layers: dict[nn.Module, EncodedLinear] = {}
    left = set()
    for name, (form, weight) in chosen.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        if type(layer) is nn.Linear and not form.transposed:
            layers[layer] = EncodedLinear(form, form.encode(weight), layer)
        else:
            left.add(name)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no plain linear layers that an engine could hold encoded: set held = "
            '"decoded" in model.format'
        )
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if module in layers:
                setattr(parent, child, layers[module])
    return left


def encoded_layers(model: nn.Module) -> dict[str, EncodedLinear]:
    """By the name of the weight that each holds."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, EncodedLinear)}
