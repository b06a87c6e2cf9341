"""How one weight lies over tensor-parallel ranks: of a trainer, of an engine, and from TP to TP' ranks through the
whole tensor. Pure functions.

    columns  [O, I]      rank r has O/tp rows of W, because y = x W^T is cut along its
             outputs        q, gate, up, embedding
    rows     [O, I]      rank r has I/tp columns                                                      o, down
    heads    [H·D, I]    whole heads; with fewer heads than ranks, H must divide tp, and tp/H
             ranks hold the same head     k, v
    stacked  [..., I]    several such weights below each other in every shard: [q_r; k_r; v_r], [gate_r; up_r]
    padded   [V', I]     a vocabulary with empty rows at its end, so that every rank has as many
    uneven   [V, I]      or without them: ranks whose parts differ by a row

`join(split(w, how, tp), how) == w` bit for bit, for any tp that the sizes allow; TP x TP' is a join and a split.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.tensor_parts import IndexRun, TensorPart


@dataclass(frozen=True, slots=True)
class ShardCut:
    """How one weight lies over the ranks.

    dim      which dimension is cut; None: every rank has all of it
    heads    0, or how many heads the dimension counts: they are never broken, and copied
             where there are fewer than ranks
    rows     0, or the true length of the dimension, which is padded to a multiple of `multiple` x tp
    parts    what is stacked in it: `ShardCut`s with their sizes in the whole tensor, in order
    uneven   whether parts may differ by one
    """

    dim: int | None = 0
    heads: int = 0
    rows: int = 0
    multiple: int = 1
    parts: tuple[tuple[int, ShardCut], ...] = field(default=())
    uneven: bool = False


def even_runs(total: int, n: int) -> list[int]:
    """Lengths of n runs that differ by at most one."""
    return [total // n + (i < total % n) for i in range(n)]


def split_shards(whole: Tensor, cut: ShardCut, tp: int) -> list[Tensor]:
    """The shard of every rank."""
    if cut.dim is None:
        return [whole] * tp
    if cut.uneven:
        return list(whole.split(even_runs(whole.shape[cut.dim], tp), cut.dim))
    if cut.parts:
        pieces = [
            split_shards(part, how, tp)
            for part, (_, how) in zip(whole.split([n for n, _ in cut.parts], cut.dim), cut.parts)
        ]
        return [torch.cat(of_rank, cut.dim) for of_rank in zip(*pieces)]
    if cut.heads and cut.heads < tp:
        _check_divisible(tp, cut.heads, "ranks", "heads")
        return [head for head in whole.chunk(cut.heads, cut.dim) for _ in range(tp // cut.heads)]
    if cut.rows:
        short = -whole.shape[cut.dim] % (cut.multiple * tp)
        shape = [*whole.shape]
        shape[cut.dim] = short
        whole = torch.cat([whole, whole.new_zeros(shape)], cut.dim)
    _check_divisible(cut.heads or whole.shape[cut.dim], tp, "heads" if cut.heads else "rows", "ranks")
    return list(whole.chunk(tp, cut.dim))


def join_shards(shards: list[Tensor], cut: ShardCut) -> Tensor:
    """The whole tensor. Copies of a head must be equal."""
    tp = len(shards)
    if cut.dim is None:
        return _single_copy(shards)
    if cut.parts:
        cuts = [shard.split([_size_per_rank(n, how, tp) for n, how in cut.parts], cut.dim) for shard in shards]
        return torch.cat([join_shards(list(part), how) for part, (_, how) in zip(zip(*cuts), cut.parts)], cut.dim)
    if cut.heads and cut.heads < tp:
        _check_divisible(tp, cut.heads, "ranks", "heads")
        times = tp // cut.heads
        return torch.cat([_single_copy(shards[i : i + times]) for i in range(0, tp, times)], cut.dim)
    whole = torch.cat(shards, cut.dim)
    if not cut.rows:
        return whole
    if whole.narrow(cut.dim, cut.rows, whole.shape[cut.dim] - cut.rows).count_nonzero():
        raise SyncError(f"the padding behind row {cut.rows} of a vocabulary is not empty: its tokens were trained")
    return whole.narrow(cut.dim, 0, cut.rows)


def _size_per_rank(n: int, cut: ShardCut, tp: int) -> int:
    """How much of n a rank has."""
    return n // min(tp, cut.heads or tp)


def _single_copy(copies: list[Tensor]) -> Tensor:
    if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
        raise SyncError(f"{len(copies)} ranks hold a copy of the same weight, and the copies differ")
    return copies[0]


def _check_divisible(n: int, by: int, what: str, whose: str) -> None:
    if n % by:
        raise SyncError(f"{n} {what} over {by} {whose}: one must divide the other")


def part_of(part: TensorPart, cut: ShardCut | None, tp: int, index: int) -> TensorPart:
    """What rank `index` of tp has of a tensor, or of a part of one, that is cut like this."""
    if cut is None or cut.dim is None:
        return part
    length = part.shape[cut.dim]
    # which rows it has: by cutting their numbers, from 1 on, since padding is 0
    mine = split_shards(torch.arange(1, length + 1), _along_first(cut), tp)[index].tolist()
    runs: list[IndexRun] = []
    for here, number in enumerate(mine):
        if number and runs and (runs[-1].here + runs[-1].size, runs[-1].whole + runs[-1].size) == (here, number - 1):
            runs[-1] = replace(runs[-1], size=runs[-1].size + 1)
        elif number:
            runs.append(IndexRun(here, number - 1, 1))
    return part.cut(cut.dim, len(mine), runs)


def _along_first(cut: ShardCut) -> ShardCut:
    return replace(cut, dim=0, parts=tuple((n, _along_first(how)) for n, how in cut.parts))
