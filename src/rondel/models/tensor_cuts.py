"""How the parameters of a model lie over tensor- or expert-parallel ranks, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rondel.models.collectives import RankGroup, gather_runs
from rondel.models.shard_cut import ShardCut, join_shards, split_shards
from rondel.models.vocabulary_part import VocabularyPart


@dataclass(slots=True)
class TensorCuts:
    """How the parameters of a model lie over the ranks, by name."""

    ranks: RankGroup
    sequence: bool
    cuts: dict[str, ShardCut] = field(default_factory=dict)  # of those that are cut
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of the same, whole
    partial: set[str] = field(default_factory=set)  # whole ones, of whose gradient each rank has a part
    vocabulary: VocabularyPart | None = None

    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor that lies over the ranks like this parameter; all of them ask."""
        if (cut := self.cuts.get(name)) is None:
            return part
        sizes: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(sizes, tuple(part.shape), self.ranks.group)
        flat = gather_runs(part.flatten(), [math.prod(size) for size in sizes], self.ranks)
        parts = flat.split([math.prod(size) for size in sizes])
        return join_shards([piece.view(size) for piece, size in zip(parts, sizes)], cut)

    def split(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that lies over the ranks like this parameter."""
        cut = self.cuts.get(name)
        return whole if cut is None else split_shards(whole, cut, self.ranks.size)[self.ranks.index]


def join_cuts(cuts: Iterable[TensorCuts | None], name: str, part: Tensor) -> Tensor:
    """The whole of a tensor that lies over the ranks of each of these like this parameter."""
    for cut in cuts:
        part = part if cut is None else cut.join(name, part)
    return part
