"""Digests of whole tensors of which each rank has a part, and nobody more.

rank 0  its part ── sums of the numbers that no lower rank has ──┐
rank 1  its part ── alike ───────────────────────────────────────┴── added up: the sums of the whole, and its digest
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.tensor_parts import Block, TensorPart
from rondel.core.types import TensorInfo
from rondel.models.names import DigestSums, digest_length
from rondel.models.shard_cut import part_of

if TYPE_CHECKING:
    from rondel.models.collectives import RankGroup
    from rondel.models.tensor_cuts import TensorCuts


class PartDigests:
    """Of tensors that lie over the ranks of `cuts`.

    parts   this rank's part of each
    values  the sums of all, one behind the other; those of all ranks together are those of the whole
    """

    def __init__(self, rows: Sequence[TensorInfo], cuts: TensorCuts, device: torch.device) -> None:
        self.rows = rows
        self.parts: dict[str, TensorPart] = {}
        self._counted: dict[str, list[Block]] = {}
        for row in rows:
            self.parts[row.name], self._counted[row.name] = _own_numbers(row, cuts)
        sizes = [prod(row.shape) * getattr(torch, row.dtype).itemsize for row in rows]
        lengths = [digest_length(size) for size in sizes]
        self.values = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        self._sums = {
            row.name: DigestSums(size, device=device, values=own)
            for row, size, own in zip(rows, sizes, self.values.split(lengths))
        }
        self._shapes = {row.name: row.shape for row in rows}

    def add_part(self, name: str, part: Tensor) -> None:
        """What this rank has of a tensor, once."""
        for block in self._counted[name]:
            box = part
            for dim, (first, n) in enumerate(zip(block.here, block.size)):
                box = box.narrow(dim, first, n)
            self._sums[name].add_box(self._shapes[name], block.start, box.to(self.values.device))

    def find_wrong(self, ranks: RankGroup) -> list[str]:
        """Names of tensors that are not as they were announced; all ranks ask at the same time (or add their `values`)."""
        ranks.all_reduce(self.values)
        return [row.name for row in self.rows if self._sums[row.name].digest() != row.digest]


def _own_numbers(row: TensorInfo, cuts: TensorCuts) -> tuple[TensorPart, list[Block]]:
    """This rank's part, and the blocks of it that no lower rank has."""
    whole, cut, ranks = TensorPart.whole(row.shape), cuts.cuts.get(row.name), cuts.ranks
    if cut is None:
        return whole, [] if ranks.index else list(whole.blocks)
    own = part_of(whole, cut, ranks.size, ranks.index)
    left = list(own.blocks)
    for lower in range(ranks.index):
        for taken in part_of(whole, cut, ranks.size, lower).blocks:
            left = [rest for block in left for rest in block.without(taken)]
    return own, left
