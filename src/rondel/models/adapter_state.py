"""What is trained of an adapted model, and the switch that all of its layers share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondel.models.shard_cut import ShardCut, split_shards

NAME = "default"  # peft's name of the only adapter


@dataclass(slots=True, eq=False)
class ModelAdapter:
    """What is trained of an adapted model, and the switch that all of its layers ask.

    config   peft's LoraConfig, as it is stored
    layers   {"model.layers.0.self_attn.q_proj": peft's layer, ...}
    off      True computes the base alone
    exact    True takes products whose rows do not depend on each other (aligned numerics), else the fastest
    """

    config: Any
    layers: dict[str, Any]
    off: bool = False
    exact: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing yet."""
        return not any(bool(layer.lora_B[NAME].weight.any()) for layer in self.layers.values())

    @property
    def parameter_count(self) -> int:
        """sum of r (I + O) over its layers."""
        return sum(m.weight.numel() for layer in self.layers.values() for m in (layer.lora_A[NAME], layer.lora_B[NAME]))


def own_factors(layer: Any) -> tuple[Tensor, Tensor]:
    """A [r, I] and B [O, r] of an adapted layer; where its matrix is cut over ranks,
    what belongs to this rank's part."""
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    cut: FactorCut | None = getattr(layer, "factor_cut", None)
    return (a, b) if cut is None else cut.take_own(a, b)


@dataclass(frozen=True, slots=True)
class FactorCut:
    """Which part of an adapter's factors a rank computes with, where W is cut over n of them. Both factors lie whole on
    every rank, each of which finds its part of their gradients.

        columns  W_i = W[own rows]      y_i = W_i x + s B[own rows] (A x)
        rows     W_i = W[:, own]        y = sum over ranks of (W_i x_i + s B (A[:, own] x_i))      one sum for both
    """

    cut: ShardCut
    index: int
    ranks: int

    def take_own(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if self.cut.dim == 0:
            return a, split_shards(b, self.cut, self.ranks)[self.index]
        return split_shards(a, self.cut, self.ranks)[self.index], b


@contextmanager
def adapter_mode(adapter: ModelAdapter, *, off: bool, exact: bool) -> Iterator[None]:
    """For one forward pass."""
    before = adapter.off, adapter.exact
    adapter.off, adapter.exact = off, exact
    try:
        yield
    finally:
        adapter.off, adapter.exact = before


@contextmanager
def randomized_adapter(adapter: ModelAdapter | None) -> Iterator[None]:
    """A fresh adapter adds exact zeros, with which nothing can be proven of it: inside, B holds noise."""
    tensors = [layer.lora_B[NAME].weight for layer in adapter.layers.values()] if adapter is not None else []
    kept, generator = [t.detach().clone() for t in tensors], torch.Generator().manual_seed(5)
    with torch.no_grad():
        for t in tensors:
            t.copy_(0.05 * torch.randn(t.shape, generator=generator))
        try:
            yield
        finally:
            for t, old in zip(tensors, kept):
                t.copy_(old)
