"""One packed row over several ranks: each has a run of its tokens, and the keys and values of all (context parallel).

    rank 0   | prompt P | c1 ..... │                       │ queries of its run
    rank 1              c1 │ c2 .... | c3 ...... |         │ over keys and values of the whole row, gathered in each
    layer

A segment that a cut goes through is two, of which the second continues the first, so the layout of packed training
carries it. Cuts are where the work is equal, not the tokens: a token costs its own products and its context's scores.
Gathered keys and values are not kept for the backward pass, they are gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.models.collectives import RankGroup, computed_again, gather_rows
from rondel.models.compressed_entries import CompressedEntries
from rondel.models.key_choice import IndexedTokens, choose_in_pack
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent.layout import SegmentStates, StateRule
from rondel.models.score_rule import ScoreRule

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection

PRODUCTS = 6  # times the hidden size: keys whose scores cost as much as a token's own products in a layer


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Who shares a row, and what a token costs beside its context, in keys."""

    ranks: RankGroup
    token_cost: int

    def row_lengths(self, segments: Sequence[PackedSegment]) -> list[int]:
        """How many tokens of a row each rank takes: the same on all of them, and at least one; all to the first rank
        where there are fewer tokens than ranks.
        """
        cost = np.concatenate([self.token_cost + depth for depth in _contexts(segments)])
        n, total, done = self.ranks.size, len(cost), np.cumsum(cost)
        if total < n:
            return [total] + [0] * (n - 1)
        cuts = [0]
        for i in range(1, n):
            equal = int(np.searchsorted(done, done[-1] * i / n))
            cuts.append(min(max(equal, cuts[-1] + 1), total - n + i))
        return [end - begin for begin, end in pairwise([*cuts, total])]

    def own_layout(
        self, segments: Sequence[PackedSegment], lengths: Sequence[int], device: torch.device | str
    ) -> ContextLayout:
        """Who sees whom in this rank's run."""
        return ContextLayout(segments, lengths, self.ranks, device)


def _contexts(segments: Sequence[PackedSegment]) -> list[np.ndarray]:
    """Of each segment's tokens, how many they see."""
    above: list[int] = []
    for s in segments:
        above.append(0 if s.parent is None else above[s.parent] + segments[s.parent].length)
    return [depth + np.arange(1, s.length + 1) for depth, s in zip(above, segments)]


def cut_segments(segments: Sequence[PackedSegment], lengths: Sequence[int]) -> list[PackedSegment]:
    """The same row, in which no segment goes over a cut."""
    borders = np.cumsum(lengths)[:-1].tolist()
    out: list[PackedSegment] = []
    last: list[int] = []  # of each segment, where its last piece is
    for s in segments:
        parent = None if s.parent is None else last[s.parent]
        ends = [b for b in borders if s.start < b < s.start + s.length] + [s.start + s.length]
        start = s.start
        for end in dict.fromkeys(ends):
            out.append(PackedSegment(start, end - start, parent))
            parent, start = len(out) - 1, end
        last.append(len(out) - 1)
    return out


class ContextLayout(PackedLayout):
    """Who sees whom, for the queries of one rank's run."""

    def __init__(
        self, segments: Sequence[PackedSegment], lengths: Sequence[int], ranks: RankGroup, device: torch.device | str
    ) -> None:
        first = sum(lengths[: ranks.index])
        pieces = cut_segments(segments, lengths)
        own = [i for i, s in enumerate(pieces) if first <= s.start < first + lengths[ranks.index]]
        super().__init__(pieces, device, own)
        self.first, self.rows = first, lengths[ranks.index]
        self.lengths, self.ranks, self.whole = list(lengths), ranks, segments

    def _gather(self, x: Tensor) -> Tensor:
        return gather_rows(x, self.lengths, self.ranks, summed=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        def attend_gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return PackedLayout.attend(self, layer, q, self._gather(k), self._gather(v), rule)

        return computed_again(attend_gathered, q, k, v)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        def attend_gathered(q: Tensor, c: Tensor, r: Tensor) -> Tensor:
            return PackedLayout.attend(self, layer, q, *up.expand(self._gather(c), self._gather(r)), rule)

        return computed_again(attend_gathered, q, c, r)

    def attend_compressed(
        self, layer: int, q: Tensor, kv: Tensor, entries: CompressedEntries | None, rule: ScoreRule
    ) -> Tensor:
        def attend_gathered(q: Tensor, kv: Tensor, *rows: Tensor) -> Tensor:
            older = None if entries is None else replace(entries, rows=self._gather(rows[0]))
            return PackedLayout.attend_compressed(self, layer, q, self._gather(kv), older, rule)

        return computed_again(attend_gathered, q, kv, *([] if entries is None else [entries.rows]))

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> Tensor:
        return choose_in_pack(self.calls, replace(tokens, k=self._gather(tokens.k)))

    @property
    def states(self) -> Any:
        """Recurrent layers see the whole row on every rank, and keep what is theirs."""
        return _GatheredStates(self)


class _GatheredStates:
    def __init__(self, layout: ContextLayout) -> None:
        self.layout = layout
        self.whole = SegmentStates(layout.whole, layout.device)

    def scan(self, layer: int, rule: StateRule, *inputs: Tensor) -> Tensor:
        out = self.whole.scan(layer, rule, *(self.layout._gather(x) for x in inputs))
        return out[self.layout.first : self.layout.first + self.layout.rows]
