"""What one rank computes of a packed row that several share (context parallel): some of its tokens, the targets that
these predict, and how what all found out becomes whole again.

A loss sees whole samples on every rank, so no row of the table knows that its logprobs were computed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.models.collectives import RankGroup, gather_rows

if TYPE_CHECKING:
    from rondel.core.row_split import RowDealing
    from rondel.models.context_parallel import ContextLayout, ContextRanks
    from rondel.models.head import LMHead
    from rondel.models.image_features import VisionFeatures
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.packed_layout import PackedLayout, PackedSegment
    from rondel.models.routing_tape import RoutingTape
    from rondel.train.pack import ImageLookups, PackedBatch
    from rondel.train.sampling_mask import SupportMask


@dataclass(frozen=True, slots=True)
class RowShare:
    """`tokens`, `positions` [t] of this rank's part, `source` [m] in it, `target` [m]: what a PackedBatch has of the
    whole row.

    own      [m] which of the row's M targets these are
    lengths  tokens of each rank's part
    counts   how many targets each rank has
    place    [M] where a target lies among those of all ranks, one rank's behind the other's
    order    [T] the same of the row's tokens; None where every rank computes them all
    """

    tokens: Tensor
    positions: Tensor
    source: Tensor
    target: Tensor
    own: Tensor
    layout: PackedLayout | ContextLayout
    kept: SupportMask | None
    looks: ImageLookups | None
    ranks: RankGroup
    lengths: list[int]
    counts: list[int]
    place: Tensor
    order: Tensor | None

    def join_targets(self, values_m: Tensor) -> Tensor:
        """Of the own targets -> of all [M], on every rank; the gradient of its own goes back to each."""
        return gather_rows(values_m, self.counts, self.ranks, summed=False).index_select(0, self.place)

    def encode_images(self, loaded: LoadedModel) -> VisionFeatures | None:
        """What this model sees in the own tokens; the pictures of others' are encoded by these."""
        return None if self.looks is None else self.looks.encode(loaded)

    def join_rows(self, values_t: Tensor) -> Tensor:
        """Of the own tokens -> of the whole row [T]."""
        if self.order is None:
            return values_t
        return gather_rows(values_t, self.lengths, self.ranks, summed=False).index_select(0, self.order)

    def join_flips(self, tape: RoutingTape | None) -> None:
        """What each rank's tape has of its own tokens becomes that of the whole row."""
        if tape is not None and tape.routes is not None:
            tape.flips = [self.join_rows(flips_t) if i in tape.own else flips_t for i, flips_t in enumerate(tape.flips)]
            tape.margins = [self.join_rows(m_t) if len(m_t) else m_t for m_t in tape.margins]


def own_share(packed: PackedBatch, context: ContextRanks) -> RowShare:
    """This rank's part of a micro-batch."""
    segments, device = packed.layout.segments, packed.source.device
    dealing = context.deal_row(segments)
    parts = _rank_rows(segments, dealing)
    lengths, index = list(map(len, parts)), context.ranks.index
    owner, place = torch.empty(2, sum(lengths), dtype=torch.int64)
    for rank, rows in enumerate(parts):
        owner[rows], place[rows] = rank, torch.arange(len(rows))
    owner_M = owner.to(device)[packed.source]
    mine = (owner_M == index).nonzero()[:, 0]
    rows, order = torch.arange(sum(lengths), device=device), None
    layout: PackedLayout | ContextLayout = packed.layout
    if 0 not in lengths:  # or there are fewer tokens than ranks: all compute them, and the first one's count
        rows, order = parts[index].to(device), torch.cat(parts).argsort().to(device)
        layout = context.own_layout(segments, dealing, packed.tokens.device)
    return RowShare(
        packed.tokens[rows],
        packed.positions[..., rows],
        place.to(device)[packed.source[mine]],
        packed.target[mine],
        mine,
        layout,
        None if packed.kept is None else packed.kept.of_tokens(mine),
        None if packed.looks is None else packed.looks.of_rows(_places_among(rows, sum(lengths))),
        context.ranks,
        lengths,
        owner_M.bincount(minlength=len(lengths)).tolist(),
        owner_M.argsort(stable=True).argsort(),
        order,
    )


def forward_stage(loaded: LoadedModel, packed: PackedBatch, tape: RoutingTape | None = None) -> Tensor:
    """The layers of a stage over one micro-batch, sent to the next stage. -> 0, whose backward pass receives their
    gradient from there.
    """
    own = packed if loaded.context is None else own_share(packed, loaded.context)

    def compute_states(head: LMHead) -> Tensor:
        assert loaded.stage is not None
        seen = own.encode_images(loaded)
        return loaded.stage.send_forward(loaded.hidden_states(own.tokens, own.positions, own.layout, tape, seen))

    sent: Tensor = loaded.run_with_head(compute_states)
    own.join_flips(tape)
    return sent


def _places_among(rows: Tensor, total: int) -> Tensor:
    """[total] the place of each token of the row among these rows, -1 of the others."""
    places = torch.full((total,), -1, dtype=torch.int64, device=rows.device)
    places[rows] = torch.arange(len(rows), device=rows.device)
    return places


def own_routes(loaded: LoadedModel, packed: PackedBatch) -> Tensor:
    """Recorded routes of this rank's part."""
    assert packed.routes is not None
    if loaded.context is None:
        return packed.routes
    segments = packed.layout.segments
    rows = _rank_rows(segments, loaded.context.deal_row(segments))
    own = rows[loaded.context.ranks.index].to(packed.routes.device)
    return packed.routes[own] if all(map(len, rows)) else packed.routes


def _rank_rows(segments: Sequence[PackedSegment], dealing: RowDealing) -> list[Tensor]:
    """Of each rank, where in the row its tokens lie."""
    return [
        torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(run.start, run.stop) for run in runs)])
        for runs in dealing.rank_places(segments)
    ]


def count_shared(context: ContextRanks, packed: PackedBatch) -> int:
    """Tokens of a micro-batch whose keys and values its ranks give each other."""
    return context.deal_row(packed.layout.segments).shared_tokens
