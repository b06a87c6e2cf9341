"""Attention of packed training in loops for CPUs with AVX-512 or AVX2 (cpu_tree.cpp): no mask, no padding, no
copy of a shared prompt, and no scores that wait for the backward pass.

    o_i = sum_j p_ij v_j,   p_ij = exp(scale q_i k_j - lse_i)      over the j that i sees, p rounded to its dtype
    ds_ij = scale p_ij (do_i v_j - sum_j p_ij do_i v_j),           dq = ds K,  dk = dsᵀ Q,  dv = pᵀ do, summed in fp32

Scores are in fp32, as those of a decode step. Gradients of keys that several answers share are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from rondel.models.dense_attention import ScoreRule
    from rondel.models.tree_attention import TreeSegment

UNIT, WIDEST = 32, 256  # numbers of a head
CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in models/cpu_kernels.py


def takes_tree(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> bool:
    """Whether `attend_tree` computes it, for segments that see themselves causally, where the kernels of
    models/cpu_kernels.py compute at all.
    """
    others = (rule.softcap, rule.chunk, rule.sinks, rule.slopes, rule.chosen, rule.images)
    return (
        all(other is None for other in others)
        and q.dtype == k.dtype == v.dtype in CODES
        and q.shape[2] == k.shape[2] == v.shape[2] <= WIDEST
        and not q.shape[2] % UNIT
        and len(q) > 0
    )


class TreeTable:
    """Who sees whom, as the loops read it: rows (first query, queries, keys above, where their places begin), places of
    keys above, and families of rows, each of which shares no key with the others. A row's own keys lie where its
    queries do.
    """

    def __init__(self, rows: list[tuple[int, int, int, int]], above: Tensor, families: list[list[int]]) -> None:
        work = [sum(rows[i][1] * (rows[i][1] + rows[i][2]) for i in own) for own in families]
        order = [own for _, own in sorted(zip(work, families), key=lambda one: -one[0])]
        self.segments, self.above = torch.tensor(rows, dtype=torch.int64), above
        self.members = torch.tensor([i for own in order for i in own], dtype=torch.int64)
        self.first = torch.tensor([0, *(len(own) for own in order)]).cumsum(0)

    @classmethod
    def of_segments(cls, segments: Sequence[TreeSegment]) -> TreeTable:
        """A segment sees its ancestors whole."""
        above, roots, rows = list[list[int]](), list[int](), list[tuple[int, int, int, int]]()
        places, families = list[int](), dict[int, list[int]]()
        for i, segment in enumerate(segments):
            up = segment.parent
            above.append([] if up is None else [*above[up], *_places_of(segments[up])])
            roots.append(i if up is None else roots[up])
            rows.append((segment.start, segment.length, len(above[i]), len(places)))
            places += above[i]
            families.setdefault(roots[i], []).append(i)
        return cls(rows, torch.tensor(places, dtype=torch.int64), [*families.values()])

    def run(self, kernels: Any, q: Tensor, k: Tensor, rule: ScoreRule, *tensors: Tensor, backward: bool) -> None:
        (_, heads, size), shared = q.shape, k.shape[1]
        sizes = [heads, shared, size, rule.window or 0, len(self.first) - 1]
        read = (self.segments, self.above, self.members, self.first, q, k, *tensors)
        tree = torch.tensor([*sizes, *(x.data_ptr() for x in read)])
        kernels.rondel_tree(CODES[q.dtype], int(backward), tree.data_ptr(), rule.scale, torch.get_num_threads())


def _places_of(segment: TreeSegment) -> range:
    return range(segment.start, segment.start + segment.length)


def attend_tree(q: Tensor, k: Tensor, v: Tensor, table: TreeTable, rule: ScoreRule, kernels: Any) -> Tensor:
    """q [T,H,D], k and v [T,K,D] -> [T,H,D], after `takes_tree`. `kernels`: the library of models/native_library.py."""
    out: Tensor = TreeAttention.apply(q, k, v, table, rule, kernels)
    return out


class TreeAttention(torch.autograd.Function):
    """Kept: q, k, v and the logarithm of each row's sum."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, table: TreeTable, rule: ScoreRule, kernels: Any) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, log_sums = tree_forward(q, k, v, table, rule, kernels)
        ctx.save_for_backward(q, k, v, log_sums)
        ctx.table, ctx.rule, ctx.kernels = table, rule, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        return *tree_backward(ctx.saved_tensors, grad.contiguous(), ctx.table, ctx.rule, ctx.kernels), None, None, None


def tree_forward(
    q: Tensor, k: Tensor, v: Tensor, table: TreeTable, rule: ScoreRule, kernels: Any
) -> tuple[Tensor, Tensor]:
    """All contiguous -> what was attended [T,H,D], and the logarithm of each row's sum [T,H]."""
    out, log_sums = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    table.run(kernels, q, k, rule, v, out, log_sums, backward=False)
    return out, log_sums


def tree_backward(
    kept: Sequence[Tensor], grad: Tensor, table: TreeTable, rule: ScoreRule, kernels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k, v and log sums, `grad` [T,H,D] of what was attended -> the gradients of q, k and v."""
    q, k, v, log_sums = kept
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sums = [torch.empty(x.shape, dtype=torch.float32) for x in (k, v)]
    table.run(kernels, q, k, rule, v, dq, log_sums, grad, dq, *sums, dk, dv, backward=True)
    return dq, dk, dv
