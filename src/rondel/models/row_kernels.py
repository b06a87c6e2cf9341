"""Norms and gated activations as one kernel each, forward and backward, for GPUs and weights of 16 bits.

    rms_norm   y = w · x̂,  x̂ = x r,  r = rsqrt(mean(x²) + eps)     dx = r (g w - x̂ mean(g w x̂)),  dw = sum_rows g x̂
    swiglu     y = silu(g) · u                                       dg = dy u σ(g) (1 + g (1 - σ(g))),  du = dy silu(g)

They round where the modules of transformers do: x̂ to the dtype of x, silu(g) to that of g. A row of a norm is read
once; torch's operations read and write it seven times. The sum of dw is in a fixed order: rows of a program, then
programs. Tests compare values and gradients with the modules through Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # of a norm's backward pass at most: each has a row of the gradient of the weight
COLUMNS = 1024  # numbers of a program of the activation


def norm_bytes(rows: int, size: int, element: int, *, backward: bool) -> int:
    """Bytes that a norm with a trained weight of 16 bits loads and stores; `element`: of a number of x."""
    if not backward:
        return rows * (size * (element + 2 + 2) + 4)
    return rows * (size * (2 * element + 2) + 4) + min(rows, PROGRAMS) * size * (2 + 4)


def gate_bytes(count: int, element: int, *, backward: bool) -> int:
    """Of an activation of `count` numbers."""
    return count * element * (5 if backward else 3)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] of 16 bits -> [..., D] in the dtype of the weight."""
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of one shape and dtype."""
    return _SwiGLU.apply(gate, up)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(rows.shape, dtype=weight.dtype, device=x.device)
        keeps = any(ctx.needs_input_grad)
        inverse = torch.empty(len(rows) if keeps else 1, dtype=torch.float32, device=x.device)
        if len(rows):
            _norm_kernel[(len(rows),)](
                rows, weight, out, inverse, eps, rows.shape[1], SIZE_P=triton.next_power_of_2(rows.shape[1]),
                ROUNDS=x.dtype != torch.float32, KEEPS=keeps, num_warps=_warps(rows.shape[1]),
            )  # fmt: skip
        if keeps:
            ctx.save_for_backward(rows, weight, inverse)
        ctx.shape = x.shape
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weight, inverse = ctx.saved_tensors
        wants = ctx.needs_input_grad[1]
        dx = torch.empty_like(rows)
        programs = min(len(rows), PROGRAMS)
        partial = torch.zeros(programs if wants else 1, rows.shape[1], dtype=torch.float32, device=rows.device)
        if len(rows):
            _norm_gradient_kernel[(programs,)](
                rows, weight, inverse, grad.reshape(rows.shape).contiguous(), dx, partial, len(rows), rows.shape[1],
                SIZE_P=triton.next_power_of_2(rows.shape[1]), ROUNDS=rows.dtype != torch.float32, WANTS_WEIGHT=wants,
                num_warps=_warps(rows.shape[1]),
            )  # fmt: skip
        return dx.view(ctx.shape), partial.sum(0).to(weight.dtype) if wants else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor):
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        if out.numel():
            _gate_kernel[(triton.cdiv(out.numel(), COLUMNS),)](gate, up, out, out.numel(), COLUMNS=COLUMNS)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _gate_gradient_kernel[(triton.cdiv(gate.numel(), COLUMNS),)](
                gate, up, grad.contiguous(), dgate, dup, gate.numel(), COLUMNS=COLUMNS
            )
        return dgate, dup


def _warps(size: int) -> int:
    return 4 if size <= 2048 else 8


@triton.jit
def _norm_kernel(
    x, weight, out, inverse, eps, size, SIZE_P: tl.constexpr, ROUNDS: tl.constexpr, KEEPS: tl.constexpr
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE_P)
    numbers = tl.load(x + row * size + d, mask=d < size, other=0.0)
    wide = numbers.to(tl.float32)
    r = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = wide * r
    if ROUNDS:
        normed = normed.to(numbers.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + d, scaled.to(out.dtype.element_ty), mask=d < size)
    if KEEPS:
        tl.store(inverse + row, r)


@triton.jit
def _norm_gradient_kernel(
    x, weight, inverse, grad, dx, partial, rows, size,
    SIZE_P: tl.constexpr, ROUNDS: tl.constexpr, WANTS_WEIGHT: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SIZE_P)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    of_weight = tl.zeros([SIZE_P], tl.float32)
    for at in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = (tl.full([], 0, tl.int64) + at) * size
        numbers = tl.load(x + row + d, mask=d < size, other=0.0)
        g, r = tl.load(grad + row + d, mask=d < size, other=0.0).to(tl.float32), tl.load(inverse + at)
        normed = numbers.to(tl.float32) * r
        pulled = g * w
        along = tl.sum(pulled * normed, 0) / size
        tl.store(dx + row + d, (r * (pulled - normed * along)).to(dx.dtype.element_ty), mask=d < size)
        if WANTS_WEIGHT:
            if ROUNDS:
                normed = normed.to(numbers.dtype).to(tl.float32)
            of_weight += g * normed
    if WANTS_WEIGHT:
        tl.store(partial + tl.program_id(0) * size + d, of_weight, mask=d < size)


@triton.jit
def _gate_kernel(gate, up, out, count, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(gate + at, mask=at < count, other=0.0)
    wide = g.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(g.dtype).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (active * u).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _gate_gradient_kernel(gate, up, grad, out, dx, count, COLUMNS: tl.constexpr):
    """out: of the gate; dx: of `up`."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(gate + at, mask=at < count, other=0.0)
    wide, u = g.to(tl.float32), tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    dy, share = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32), tl.sigmoid(wide)
    active = (wide * share).to(g.dtype).to(tl.float32)
    pulled = (dy * u).to(g.dtype).to(tl.float32)  # the gradient of silu(g), which has its dtype
    tl.store(out + at, (pulled * share * (1.0 + wide * (1.0 - share))).to(out.dtype.element_ty), mask=at < count)
    tl.store(dx + at, (dy * active).to(dx.dtype.element_ty), mask=at < count)
