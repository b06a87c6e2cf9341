"""out + s · B (A x) of an adapter, with a backward pass that keeps nothing in float32."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # rows of one float32 copy on a CPU


class LoraProduct(torch.autograd.Function):
    """out [T, O] + s · B (A x [T, I]), a block of rows at a time: its float32 copies then stay
    in the cache, and nothing is kept in float32.
    """

    @staticmethod
    def forward(ctx, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low, y = x.new_empty(len(x), len(a), dtype=torch.float32), torch.empty_like(out)
        for rows in _row_blocks(x):
            low[rows] = x[rows].float() @ a.t()
            y[rows] = torch.addmm(out[rows].float(), low[rows], b.t(), alpha=scale)
        ctx.save_for_backward(x, low, a, b)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, low, a, b = ctx.saved_tensors
        grad_x, grad_a, grad_b = torch.empty_like(x), torch.zeros_like(a), torch.zeros_like(b)
        for rows in _row_blocks(x):
            g = grad[rows].float()
            through = ctx.scale * (g @ b)
            grad_b.addmm_(g.t(), low[rows], alpha=ctx.scale)
            grad_a.addmm_(through.t(), x[rows].float())
            grad_x[rows] = through @ a
        return grad, grad_x, grad_a, grad_b, None


def _row_blocks(x: Tensor) -> list[slice]:
    size = BLOCK if x.is_cpu else max(1, len(x))
    return [slice(first, first + size) for first in range(0, len(x), size)]
