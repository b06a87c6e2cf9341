"""What a number format is: weights as codes and scales, and what a trainer
computes with so that both are the same bits.

    encode(w) -> {name: tensor}      what is stored and travels
    decode(parts) -> w               what an engine computes with
    fake(w) = decode(encode(w))      what a trainer computes with; its gradient passes unchanged (arXiv:1308.3432)

Laws: what an engine decodes is what the trainer fakes, bit for bit; encode(decode(encode(w))) = encode(w), decoded in
float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Parts = dict[str, Tensor]  # "weight", "weight_scale", ...: of one weight, by what a checkpoint of the format calls them


@dataclass(frozen=True)
class NumberFormat(ABC):
    """One format. Weights are [..., O, I]; blocks lie in the last two dimensions."""

    name: ClassVar[str]
    source: ClassVar[str] = ""  # the paper or specification

    block: tuple[int, int]  # (rows, columns) of numbers that share a scale

    @abstractmethod
    def encode(self, weight: Tensor) -> Parts:
        """[..., O, I], any float dtype -> codes and scales. ModelError where a number is not finite."""

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """-> [..., O, I]"""

    @abstractmethod
    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a weight [..., O, I]: codes, scales, shapes."""

    @property
    def scales_tensor(self) -> bool:
        """Whether a scale depends on all numbers of a tensor, over every matrix in it."""
        return False

    @property
    def bits(self) -> float:
        """Of one weight of a large matrix, with its share of the scales."""
        side = 1 << 12
        return 8 * self.stored_bytes((side, side)) / side**2

    def fake(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """decode(encode(weight)) in `dtype`, or that of the weight; its gradient goes to `weight` unchanged."""
        return _Fake.apply(weight, self, dtype or weight.dtype)


class _Fake(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, form: NumberFormat, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return form.decode(form.encode(weight), dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None
