"""Collectives with gradients, over the ranks of one group, and how rows lie over them.

    forward            backward           where
    identity           sum                into matrices that are cut: each rank has the gradient of its own part
    sum                identity           out of them: each rank has a part of every sum
    gather rows        sum, own rows      into them, where rows lie apart (sequence parallel), and keys and values of others
    sum, own rows      gather rows        out of them
    own rows           gather rows        from rows that all have alike to rows that lie apart
    gather rows        own rows           back, where everyone computes the same from there
    exchange rows      exchange back      to the ranks that hold a token's experts, and from there (expert parallel)

T rows · n ranks. Rows lie in runs, one a rank, in the order of the ranks; a run may be empty. No row is padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

COMPARED = 64  # of the logprobs of a row that ranks compare with each other


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that work on the same tensors, and which of them this one is."""

    group: dist.ProcessGroup
    index: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place, over all ranks. -> x."""
        dist.all_reduce(x, op, self.group)
        return x

    def broadcast(self, x: Tensor, *, seconds: float | None = None) -> Tensor:
        """What the first rank has in x, in place, on every rank; `seconds` that one waits for it. -> x."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if seconds is not None:
            options.timeout = timedelta(seconds=seconds)
        self.group.broadcast([x], options).wait()
        return x

    def all_to_all(self, x: Tensor, out: Tensor, sent: list[int] | None = None, got: list[int] | None = None) -> Tensor:
        """Runs of x, `sent` rows for each rank, to where runs of out, `got` rows from each, are; even ones without.
        -> out."""
        self.group.alltoall_base(out, x.contiguous(), got or [], sent or []).wait()  # groups of engines have this name
        return out

    def send(self, x: Tensor, to: int) -> None:
        """To one rank, which receives a tensor of this shape."""
        self.group.send([x.contiguous()], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What one rank sends, in place. -> x."""
        self.group.recv([x], source, 0).wait()
        return x

    def shift(self, x: Tensor, out: Tensor) -> Callable[[], None]:
        """Begin to send x to the next rank of a ring, and to receive in `out` what the one before sends; both know the
        lengths, and what is empty does not travel. -> a function that waits for both; until then they stay as they are.
        """
        return self.exchange_messages([(x, self.index + 1)], [(out, self.index - 1)])

    def exchange_messages(
        self, sent: Sequence[tuple[Tensor, int]], got: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """Begin to send tensors to other ranks, and to receive from others, whose numbers count round a ring; as
        `shift` does with two neighbours.
        """
        ops = [(dist.isend, *message) for message in sent] + [(dist.irecv, *message) for message in got]
        messages = [
            dist.P2POp(op, t, group=self.group, group_peer=peer % self.size) for op, t, peer in ops if t.numel()
        ]
        return functools.partial(wait_for_neighbours, dist.batch_isend_irecv(messages) if messages else [])

    def gather_first(self, x: Tensor) -> list[Tensor]:
        """The x of every rank, equal in shape, on the first rank; nothing on the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        out = [torch.empty_like(x) for _ in range(self.size)] if self.index == 0 else []
        self.group.gather([out] if out else [], [x], options).wait()
        return out


def wait_for_neighbours(works: Sequence[Any]) -> None:
    """Until all messages have come and gone."""
    for work in works:
        work.wait()


def gather_runs(x: Tensor, lengths: Sequence[int], ranks: RankGroup) -> Tensor:
    """This rank's run [t, ...] -> all rows [T, ...], not differentiable."""
    x = x.contiguous()
    out = x.new_empty(sum(lengths), *x.shape[1:])
    if len(set(lengths)) == 1:
        dist.all_gather_into_tensor(out, x, ranks.group)
        return out
    runs = list(out.split(list(lengths)))
    runs[ranks.index].copy_(x)
    for i, run in enumerate(runs):
        if len(run):
            dist.broadcast(run, group=ranks.group, group_src=i)
    return out


def reduce_runs(x: Tensor, lengths: Sequence[int], ranks: RankGroup) -> Tensor:
    """All rows [T, ...] of every rank -> this rank's run of their sum, not differentiable."""
    x = x.contiguous()
    if len(set(lengths)) == 1:
        out = x.new_empty(lengths[ranks.index], *x.shape[1:])
        dist.reduce_scatter_tensor(out, x, group=ranks.group)
        return out
    runs = [run.clone() for run in x.split(list(lengths))]
    for i, run in enumerate(runs):
        if len(run):
            dist.reduce(run, group=ranks.group, group_dst=i)
    return runs[ranks.index]


def gather_columns(x: Tensor, widths: Sequence[int], ranks: RankGroup) -> Tensor | None:
    """This rank's columns [C, width] -> all columns [C, sum of widths] on the first rank."""
    parts = ranks.gather_first(F.pad(x, (0, max(widths) - x.shape[1])).contiguous())
    return torch.cat([part[:, :width] for part, width in zip(parts, widths)], 1) if parts else None


def compared_columns(z: Tensor) -> Tensor:
    """Logits [C, V] -> logprobs [C, about COMPARED] of tokens evenly among all, in which ranks with the same weights
    agree: each of them depends on every weight.
    """
    return z.log_softmax(-1)[:, :: max(1, z.shape[1] // COMPARED)].contiguous()


def own_run(x: Tensor, lengths: Sequence[int], ranks: RankGroup) -> Tensor:
    """All rows -> this rank's, as a view."""
    first = [0, *accumulate(lengths)][ranks.index]
    return x[first : first + lengths[ranks.index]]


class _EnterCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: RankGroup):
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.ranks.all_reduce(grad.contiguous().clone()), None


class _LeaveCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: RankGroup):
        return ranks.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, lengths: Sequence[int], ranks: RankGroup, summed: bool):
        ctx.lengths, ctx.ranks, ctx.summed = lengths, ranks, summed
        return gather_runs(x, lengths, ranks)

    @staticmethod
    def backward(ctx, grad: Tensor):
        take = reduce_runs if ctx.summed else own_run
        return take(grad, ctx.lengths, ctx.ranks), None, None, None


class _KeepRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, lengths: Sequence[int], ranks: RankGroup, summed: bool):
        ctx.lengths, ctx.ranks = lengths, ranks
        return reduce_runs(x, lengths, ranks) if summed else own_run(x, lengths, ranks).clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return gather_runs(grad, ctx.lengths, ctx.ranks), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], got: list[int], ranks: RankGroup):
        ctx.sent, ctx.got, ctx.ranks = sent, got, ranks
        return _all_to_all(x, sent, got, ranks)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_to_all(grad, ctx.got, ctx.sent, ctx.ranks), None, None, None


def _all_to_all(x: Tensor, sent: list[int], got: list[int], ranks: RankGroup) -> Tensor:
    return ranks.all_to_all(x, x.new_empty(sum(got), *x.shape[1:]), sent, got)


def enter_cut(x: Tensor, ranks: RankGroup) -> Tensor:
    """What all ranks have alike, on its way into their parts: the same; backward the sum of their gradients."""
    return _EnterCut.apply(x, ranks)


def leave_cut(x: Tensor, ranks: RankGroup) -> Tensor:
    """Parts of a sum -> the sum, on every rank; backward the same gradient for all."""
    return _LeaveCut.apply(x, ranks)


def gather_rows(x: Tensor, lengths: Sequence[int], ranks: RankGroup, *, summed: bool) -> Tensor:
    """This rank's rows [t, ...] -> all [T, ...].

    summed  the ranks compute different things from there, so their gradients are summed; else all have the same one
    """
    return _GatherRows.apply(x, lengths, ranks, summed)


def keep_rows(x: Tensor, lengths: Sequence[int], ranks: RankGroup, *, summed: bool) -> Tensor:
    """All rows [T, ...] -> this rank's [t, ...], of the sum over the ranks (`summed`) or of what all have alike."""
    return _KeepRows.apply(x, lengths, ranks, summed)


def exchange_rows(x: Tensor, sent: list[int], got: list[int], ranks: RankGroup) -> Tensor:
    """Rows [sum(sent), ...], in runs for each rank -> rows [sum(got), ...], in runs from each rank;
    runs may be empty."""
    return _ExchangeRows.apply(x, sent, got, ranks)


def computed_again(work: Any, *inputs: Tensor) -> Tensor:
    """With a gradient, nothing but the inputs is kept for it."""
    if not torch.is_grad_enabled():
        return work(*inputs)
    return checkpoint(work, *inputs, use_reentrant=False, preserve_rng_state=False)
