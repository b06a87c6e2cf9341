"""Log-probabilities under a head that has an adapter: logits = scale · (h Wᵀ + b + s (h Aᵀ) Bᵀ), a chunk of rows at a
time, with its own backward: full logits never exist, and W gets no gradient.

    dz = g (onehot - p) scale      dh = dz W + s (dz B) A      dA = s (dz B)ᵀ h      dB = s dzᵀ (h Aᵀ)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.models.linear import as_factor, matmul

if TYPE_CHECKING:
    from rondel.models.head import LMHead

LOGITS = 1 << 25  # entries of a chunk of logits: 128 MB in fp32


def adapted_logprobs(hidden: Tensor, target: Tensor, head: LMHead, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """hidden [M, D], target [M], A [r, D], B [V, r] -> logprob [M] in fp32 at temperature 1."""
    return _HeadLogprobs.apply(hidden, a, b, target, head, scale)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, a: Tensor, b: Tensor, target: Tensor, head: LMHead, scale: float) -> Tensor:
        ctx.save_for_backward(hidden, a, b, target)
        ctx.head, ctx.scale = head, scale
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        for rows in _chunks(hidden, head):
            z = _logits(hidden[rows], a, b, head, scale)[0]
            out[rows] = z.gather(1, target[rows, None])[:, 0] - z.logsumexp(-1)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, a, b, target = ctx.saved_tensors
        head, scale = ctx.head, ctx.scale
        grad_hidden, grad_a, grad_b = torch.empty_like(hidden), torch.zeros_like(a), torch.zeros_like(b)
        for rows in _chunks(hidden, head):
            h, share = hidden[rows].float(), grad[rows, None]
            z, low = _logits(hidden[rows], a, b, head, scale)
            dz = torch.softmax(z, -1).mul_(-share)
            del z
            dz.scatter_add_(1, target[rows, None], share).mul_(head.scale)
            through = scale * (dz @ b)
            grad_a += through.t() @ h
            grad_b.addmm_(dz.t(), low, alpha=scale)
            base = matmul(dz.to(head.weight.dtype), head.weight)
            grad_hidden[rows] = (base.float() + through @ a).to(hidden.dtype)
        return grad_hidden, grad_a, grad_b, None, None, None


def _chunks(hidden: Tensor, head: LMHead) -> list[slice]:
    size = max(1, LOGITS // len(head.weight))
    return [slice(first, first + size) for first in range(0, len(hidden), size)]


def _logits(hidden: Tensor, a: Tensor, b: Tensor, head: LMHead, scale: float) -> tuple[Tensor, Tensor]:
    """-> logits [C, V] and h Aᵀ [C, r]"""
    low = hidden.float() @ a.t()
    with torch.no_grad():
        z = head.logits(as_factor(hidden, head.weight))
    return z.addmm_(low, b.t(), alpha=scale * head.scale), low
