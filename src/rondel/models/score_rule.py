"""What a layer does with attention scores before and in the softmax, as one value.

    score   s_ij = softcap * tanh(scale * q_i k_j / softcap) - slope_h * (i - j)      i, j: positions of one sequence
    sight   i sees j if 0 <= i - j < window and both lie in the same chunk of positions
    choice  i sees j only if an indexer chose j for it (models/key_choice.py)
    image   i also sees the j > i of its own image, within the window, in families whose image tokens attend both ways
    sink    weights_i = softmax([s_i0 ... s_ii, sink_h]), the last column dropped: it only takes weight away

Sinks: arXiv:2309.17453, gpt-oss. Slopes: ALiBi, arXiv:2108.12409. Chunks: Llama 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRule:
    """`ScoreRule(0.125, window=4096, sinks=module.sinks)` is a sliding layer of gpt-oss."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: Tensor | None = None  # [H] one more logit a head
    slopes: Tensor | None = None  # [H]
    chosen: Tensor | None = None  # [T,k] positions of the keys that each query of the pass may see
    images: Tensor | None = None  # [T] the image of each token of the pass, -1 for text

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """What decides who is seen: masks are kept by it."""
        return self.window, self.chunk

    def sees_all(self, length: int) -> bool:
        """Whether every query of `length` positions sees all before it."""
        return (
            self.chosen is None
            and self.images is None
            and all(limit is None or limit >= length for limit in self.reach)
        )

    def visible(self, at: Tensor, distance: Tensor) -> Tensor:
        """Positions of queries `at` and their distances to keys, in shapes that broadcast -> True where a key is seen."""
        seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance < self.window)
        return seen if self.chunk is None else seen & (distance <= at % self.chunk)

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled scores under the softcap."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def with_slopes(self, scores: Tensor, distance: Tensor | None, *shape: int) -> Tensor:
        """fp32 scores, less what the distance costs each head; the slopes in `shape` broadcast over them."""
        if self.slopes is None:
            return scores
        assert distance is not None, "slopes need distances"
        return scores - self.slopes.float().view(*shape) * distance

    def softmax(self, scores: Tensor, *shape: int) -> Tensor:
        """fp32 scores [..., N] -> weights [..., N], over the sinks in `shape` too if there are any."""
        if self.sinks is None:
            return scores.softmax(-1)
        sink = self.sinks.float().view(*shape).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]

    def sink_share(self, lse: Tensor) -> Tensor:
        """lse [..., H] of the scores -> sigmoid(lse - sink_h): what is left of an output computed without the sinks."""
        assert self.sinks is not None
        return torch.sigmoid(lse - self.sinks.float())
