"""One packed row over several ranks (context parallel): what can lie whole on one of them does, the rest lies in runs.

    rank 0   | prompt P | c1 ..... │                       │ queries of its run, over keys and values of all that is
    rank 1              c1 │ c2 .... | c3 ...... |         │ shared, gathered in each layer; and what it has whole

A segment that a cut goes through is two, of which the second continues the first, so the layout of packed training
carries it. Cuts are where the work is equal, not the tokens: a token costs its own products and its context's scores.
Gathered keys and values are not kept for the backward pass, they are gathered again. Or they are never gathered: they
go round a ring, a block at a time (models/ring_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.core.row_split import RowDealing, deal_row, spread_row
from rondel.models.collectives import RankGroup, computed_again, gather_rows
from rondel.models.compressed_entries import CompressedEntries
from rondel.models.dense_attention import ScoreRule
from rondel.models.key_choice import IndexedTokens, choose_in_pack
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent.layout import SegmentStates, StateRule
from rondel.models.ring_attention import RingRow

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Who shares a row, and what a token costs beside its context, in keys.

    spreads  all of every row lies in runs: of a model whose layers read more of a row than keys, values and states
    ring     keys and values that are shared go round a ring in place of being gathered
    """

    ranks: RankGroup
    token_cost: int
    spreads: bool = False
    ring: bool = False

    def deal_row(self, segments: Sequence[PackedSegment]) -> RowDealing:
        """Which segments lie whole on one rank, and which in runs: the same on all of them."""
        return (spread_row if self.spreads else deal_row)(segments, self.ranks.size, self.token_cost)

    def own_layout(
        self, segments: Sequence[PackedSegment], dealing: RowDealing, device: torch.device | str
    ) -> PackedLayout | ContextLayout:
        """Who sees whom of this rank's tokens."""
        if dealing.shared:
            return ContextLayout(segments, dealing, self.ranks, device, ring=self.ring)
        return PackedLayout(lay_segments(segments, dealing.whole[self.ranks.index]), device)


def lay_segments(segments: Sequence[PackedSegment], chosen: Sequence[int]) -> list[PackedSegment]:
    """The chosen segments, parents among them, one behind the other."""
    at = [0, *accumulate(segments[i].length for i in chosen)]
    place = {i: n for n, i in enumerate(chosen)}
    return [
        replace(s, start=start, parent=None if s.parent is None else place[s.parent])
        for start, s in zip(at, (segments[i] for i in chosen))
    ]


def cut_segments(segments: Sequence[PackedSegment], lengths: Sequence[int]) -> tuple[list[PackedSegment], list[int]]:
    """The same row, in which no segment goes over a cut; and of each segment where its last piece is. ModelError where a cut
    goes through one whose tokens all see each other: its first piece would not see the second.
    """
    borders = np.cumsum(lengths)[:-1].tolist()
    out: list[PackedSegment] = []
    last: list[int] = []
    for s in segments:
        parent = None if s.parent is None else last[s.parent]
        ends = [b for b in borders if s.start < b < s.start + s.length] + [s.start + s.length]
        start = s.start
        if not s.causal and len(ends) > 1:
            raise ModelError(
                f"a run of {s.length} tokens that all see each other lies over {len(ends)} ranks of cp: each such run must "
                "lie whole on one of them; leave place.mesh.cp out"
            )
        for end in dict.fromkeys(ends):
            out.append(replace(s, start=start, length=end - start, parent=parent))
            parent, start = len(out) - 1, end
        last.append(len(out) - 1)
    return out, last


class ContextLayout:
    """Who sees whom, of one rank's tokens: r of the run that it has of what is shared, then what it has whole. Keys and
    values lie alike, those of the whole run before its own.
    """

    def __init__(
        self,
        segments: Sequence[PackedSegment],
        dealing: RowDealing,
        ranks: RankGroup,
        device: torch.device | str,
        *,
        ring: bool = False,
    ) -> None:
        if ring and not all(s.causal for s in segments):
            raise ModelError(
                "a ring of keys and values passes behind each token what comes before it, and some tokens of this row see "
                'those behind them: set place.mesh.cp_attention = "all_gather"'
            )
        self.lengths, self.ranks = dealing.lengths, ranks
        self.ring = RingRow(segments, dealing, ranks, device) if ring else None
        whole = dealing.whole[ranks.index]
        self.first, self.run = sum(self.lengths[: ranks.index]), self.lengths[ranks.index]
        self.segments = lay_segments(segments, [*dealing.shared, *whole])
        self.rows = self.run + sum(segments[i].length for i in whole)
        pieces, last = cut_segments(self.segments[: len(dealing.shared)], self.lengths)
        own = [i for i, s in enumerate(pieces) if self.first <= s.start < self.first + self.run]
        self.shared = PackedLayout(pieces, device, own)
        self.alone: PackedLayout | None = None
        if whole:
            for s in self.segments[len(dealing.shared) :]:
                pieces = [*pieces, replace(s, parent=None if s.parent is None else last[s.parent])]
                last.append(len(pieces) - 1)
            self.alone = PackedLayout(pieces, device, range(len(pieces) - len(whole), len(pieces)))
        self.device = device

    def gather_run(self, x: Tensor) -> Tensor:
        """[r, ...] -> of all ranks' runs."""
        return gather_rows(x, self.lengths, self.ranks, summed=True)

    def join_whole(self, x: Tensor) -> Tensor:
        """Of the own tokens -> of all that is shared, and what this rank has whole."""
        shared = self.gather_run(x[: self.run])
        return shared if self.alone is None else torch.cat([shared, x[self.run :]])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        if self.ring is not None:
            return self.ring.attend(q, k, v, rule)

        def attend_gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, self.join_whole(k), self.join_whole(v), rule)

        return computed_again(attend_gathered, q, k, v)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        shared = sum(self.lengths)
        run = self.shared.attend(layer, q[: self.run], k[:shared], v[:shared], rule)
        return run if self.alone is None else torch.cat([run, self.alone.attend(layer, q[self.run :], k, v, rule)])

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        def attend_gathered(q: Tensor, c: Tensor, r: Tensor) -> Tensor:
            return self._attend(layer, q, *up.expand(self.join_whole(c), self.join_whole(r)), rule)

        return computed_again(attend_gathered, q, c, r)

    def attend_compressed(
        self, layer: int, q: Tensor, kv: Tensor, entries: CompressedEntries | None, rule: ScoreRule
    ) -> Tensor:
        """Of rows that are spread."""

        def attend_gathered(q: Tensor, kv: Tensor, *rows: Tensor) -> Tensor:
            older = None if entries is None else replace(entries, rows=self.gather_run(rows[0]))
            return self.shared.attend_compressed(layer, q, self.gather_run(kv), older, rule)

        return computed_again(attend_gathered, q, kv, *([] if entries is None else [entries.rows]))

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> Tensor:
        """Of rows that are spread."""
        return choose_in_pack(self.shared.calls, replace(tokens, k=self.gather_run(tokens.k)))

    @property
    def states(self) -> Any:
        """Recurrent layers see all that is shared on every rank, and keep what is theirs."""
        return _GatheredStates(self)


class _GatheredStates:
    def __init__(self, layout: ContextLayout) -> None:
        self.layout = layout
        self.joined = SegmentStates(layout.segments, layout.device)

    def scan(self, layer: int, rule: StateRule, *inputs: Tensor) -> Tensor:
        layout = self.layout
        out = self.joined.scan(layer, rule, *(layout.join_whole(x) for x in inputs))
        run = out[layout.first : layout.first + layout.run]
        return run if layout.alone is None else torch.cat([run, out[sum(layout.lengths) :]])
