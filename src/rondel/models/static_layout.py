"""Attention of a packed row whose length is fixed: who sees whom is two columns of numbers,
and no shape depends on data.

Segments lie as a tree is walked (a prompt, then all that goes on from it), so that whoever continues a segment lies in
one run behind it. Two numbers a token are then the whole layout, however many segments there are:

    tokens   | prompt P     | c1 ... | c2 .. | next prompt P' | c1' .. | padding
    end      | end of c2    | of c1  | of c2 | end of c1'     | of c1' | one place further, each
    mask     i sees j where j <= i < end[j], within the reach of the layer's rule

Column-wise masks of this kind: FlashMask, arXiv:2410.01359. All pairs of the row are computed, also those of samples
that do not see each other: this is the price of a shape that never changes.

T tokens · H query heads · K key/value heads · D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.dense_attention import sdpa
from rondel.models.packed_layout import PackedSegment
from rondel.models.processor import is_widened

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.dense_attention import ScoreRule


class StaticLayout:
    """at [T] position of each token in its own sequence; end [T] the place behind the last token that may see it."""

    def __init__(self, at: Tensor, end: Tensor) -> None:
        self.at, self.end = at, end
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    @classmethod
    def from_segments(cls, segments: Sequence[PackedSegment], device: torch.device | str = "cpu") -> StaticLayout:
        """Of segments in the order of their tree, without padding."""
        at, end = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        if segments:
            depth: list[int] = []  # tokens above each
            for s in segments:
                depth.append(0 if s.parent is None else depth[s.parent] + segments[s.parent].length)
            lengths = torch.tensor([s.length for s in segments])
            own = torch.arange(int(lengths.sum())) - torch.tensor([s.start for s in segments]).repeat_interleave(
                lengths
            )
            at = torch.tensor(depth).repeat_interleave(lengths) + own
            end = torch.tensor(subtree_ends(segments)).repeat_interleave(lengths)
        return cls(at.to(device), end.to(device))

    def padded(self, total: int) -> StaticLayout:
        """The same with tokens behind it, up to `total`, each of which sees itself alone and is seen by no other."""
        real = len(self.at)
        alone = torch.arange(real + 1, total + 1, dtype=self.end.dtype, device=self.end.device)
        return StaticLayout(F.pad(self.at, (0, total - real)), torch.cat([self.end, alone]))

    def distance(self) -> Tensor:
        """[T, T] from a query back to a key."""
        return self.at[:, None] - self.at

    def attention_mask(self, rule: ScoreRule) -> Tensor:
        """[T, T]: True where a query may look."""
        if rule.reach not in self._masks:
            place = torch.arange(len(self.at), device=self.at.device)
            seen = (place <= place[:, None]) & (place[:, None] < self.end)
            self._masks[rule.reach] = seen & rule.visible(self.at[:, None], self.distance())
        return self._masks[rule.reach]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [T,H,D], k and v [T,K,D] -> [T,H,D]."""
        distance = None if rule.slopes is None else self.distance()[None, None]
        out = sdpa(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            rule,
            mask=self.attention_mask(rule)[None, None],
            distance=distance,
            widened=is_widened(q.dtype),
            train=True,
        )
        return out[0].transpose(0, 1)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        return self.attend(layer, q, *up.expand(c, r), rule)


def subtree_ends(segments: Sequence[PackedSegment]) -> list[int]:
    """The place behind the last token of each segment and of all that continue it, which lie in one run."""
    ends = [s.start + s.length for s in segments]
    for i in reversed(range(len(segments))):
        if (parent := segments[i].parent) is not None:
            ends[parent] = max(ends[parent], ends[i])
    open_: list[int] = []  # ancestors of the place that the walk has come to
    for i, s in enumerate(segments):
        while open_ and ends[open_[-1]] <= s.start:
            open_.pop()
        assert (open_[-1] if open_ else None) == s.parent, (
            f"segment {i} does not lie in the run of its parent {s.parent}"
        )
        open_.append(i)
    return ends
