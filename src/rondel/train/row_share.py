"""What one rank computes of a packed row that several share (context parallel): its run of the tokens, the targets that
these predict, and how what all found out becomes whole again.

A loss sees whole samples on every rank, so no row of the table knows that its logprobs were computed apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import TrainError
from rondel.models.collectives import RankGroup, gather_rows

if TYPE_CHECKING:
    from rondel.models.context_parallel import ContextRanks
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.packed_layout import PackedLayout
    from rondel.train.pack import PackedBatch
    from rondel.train.sampling_mask import SupportMask


@dataclass(frozen=True, slots=True)
class RowShare:
    """`tokens`, `positions` [t] of the run, `source` [m] in it, `target` [m]: what a PackedBatch has of the whole row.

    lengths  tokens of each rank's run
    counts   how many targets each rank has
    place    [M] where a target lies among those of all ranks, one rank's behind the other's
    """

    tokens: Tensor
    positions: Tensor
    source: Tensor
    target: Tensor
    layout: PackedLayout
    kept: SupportMask | None
    ranks: RankGroup
    lengths: list[int]
    counts: list[int]
    place: Tensor

    def join_targets(self, values_m: Tensor) -> Tensor:
        """Of the own targets -> of all [M], on every rank; the gradient of its own goes back to each."""
        return gather_rows(values_m, self.counts, self.ranks, summed=False).index_select(0, self.place)

    def join_rows(self, values_t: Tensor) -> Tensor:
        """Of the tokens of the run -> of the whole row [T]."""
        return values_t if 0 in self.lengths else gather_rows(values_t, self.lengths, self.ranks, summed=False)


def own_share(packed: PackedBatch, context: ContextRanks) -> RowShare:
    """This rank's run of a micro-batch."""
    if packed.looks is not None:
        raise TrainError(
            "a row with images cannot be shared by several ranks yet: use place.mesh without cp for a model that looks"
        )
    segments = packed.layout.segments
    lengths = context.row_lengths(segments)
    ends = torch.tensor(lengths, device=packed.source.device).cumsum(0)
    owner = torch.searchsorted(ends, packed.source, right=True)
    order = owner.argsort(stable=True)
    index = context.ranks.index
    if 0 in lengths:  # fewer tokens than ranks: all compute them, and the first one's count
        first, rows, layout = 0, slice(None), packed.layout
    else:
        first = sum(lengths[:index])
        rows = slice(first, first + lengths[index])
        layout = context.own_layout(segments, lengths, packed.tokens.device)
    mine = (owner == index).nonzero()[:, 0]
    return RowShare(
        packed.tokens[rows],
        packed.positions[..., rows],
        packed.source[mine] - first,
        packed.target[mine],
        layout,
        None if packed.kept is None else packed.kept.of_tokens(mine),
        context.ranks,
        lengths,
        owner.bincount(minlength=len(lengths)).tolist(),
        order.argsort(),
    )


def own_routes(loaded: LoadedModel, packed: PackedBatch) -> Tensor:
    """Recorded routes of this rank's run."""
    assert packed.routes is not None
    if loaded.context is None:
        return packed.routes
    lengths, index = loaded.context.row_lengths(packed.layout.segments), loaded.context.ranks.index
    first = sum(lengths[:index])
    return packed.routes if 0 in lengths else packed.routes[first : first + lengths[index]]
