"""What a layer does with attention scores before and in the softmax, as one value, and the attention of a padded batch
that computes it: by torch's kernels where they carry the rule, with the scores written out where they do not.

    score   s_ij = softcap * tanh(scale * q_i k_j / softcap) - slope_h * (i - j)      i, j: positions of one sequence
    sight   i sees j if 0 <= i - j < window and both lie in the same chunk of positions
    choice  i sees j only if an indexer chose j for it (models/key_choice.py)
    image   i also sees the j > i of its own image, within the window, in families whose image tokens attend both ways
    sink    weights_i = softmax([s_i0 ... s_ii, sink_h]), the last column dropped: it only takes weight away

Sinks: arXiv:2309.17453, gpt-oss. Slopes: ALiBi, arXiv:2108.12409. Chunks: Llama 4.

B rows · H query heads · K key/value heads · Lq queries · Lk keys · D head size
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        """Positions of queries `at` and their distances to keys,
        in shapes that broadcast -> True where a key is seen."""
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


DENSE = 1 << 24  # largest number of scores that are written out at once
SHORT = 256  # queries from which torch's fused kernels train as fast on a CPU; they keep no scores


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    *,
    mask: Tensor | None = None,
    distance: Tensor | None = None,
    widened: bool = False,
    train: bool = False,
    dense: bool = False,
) -> Tensor:
    """q [B,H,Lq,D], k and v [B,K,Lk,D]; `mask` True where a query may look, None for all before it; `distance` from
    a query to a key, which slopes need, both [B or 1, 1, Lq, Lk]; `widened` where products of the dtype are computed
    in fp32 (models/processor.py); `train` for packed training; `dense` to write the scores out. -> [B,H,Lq,D].
    """
    dense = dense or rule.softcap is not None or (train and q.device.type == "cpu" and is_short(q, k))
    causal = mask is None
    if mask is None and (dense or rule.sinks is not None or rule.slopes is not None):
        mask, causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(), False
    if dense:
        return dense_attention(q, k, v, rule, mask, distance, widened)
    dtype = q.dtype
    if widened and q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()
    if mask is not None and rule.slopes is not None:
        mask = (
            rule.with_slopes(torch.zeros((), device=q.device), distance, 1, -1, 1, 1)
            .to(q.dtype)
            .masked_fill(~mask, float("-inf"))
        )
    if mask is not None and rule.sinks is not None:
        q, k, v, mask = _with_sink_key(q, k, v, rule, mask)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(dtype)


def is_short(q: Tensor, k: Tensor) -> bool:
    """Whether training on a CPU writes the scores out."""
    return q.shape[2] < SHORT and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= DENSE


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sinks for kernels that know none: a first key whose score is the sink and whose value is zero.

    q' = [q, sink_h / scale, 0 ...]   k' = [k, 0 ...]   k'_sink = [0, 1, 0 ...]   v_sink = 0

    Eight columns more, because kernels want sizes that are multiples of eight.
    """
    assert rule.sinks is not None
    sink = (rule.sinks / rule.scale).to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + 8)
    key[..., k.shape[3]] = 1
    q, k = torch.cat([q, F.pad(sink, (0, 7))], -1), torch.cat([key, F.pad(k, (0, 8))], 2)
    return q, k, F.pad(v, (0, 0, 1, 0)), F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, mask: Tensor | None, distance: Tensor | None, widened: bool
) -> Tensor:
    """The scores written out. Training on a CPU takes it for short segments: torch's fused backward pass is up to 8
    times slower there in bf16 (docs/LOG.md).
    """
    dtype = q.dtype
    if widened:
        q, k, v = q.float(), k.float(), v.float()
    batch, heads, length, size = q.shape
    # the query heads of one key head become its queries: no copy of the keys
    folded = q.reshape(batch, k.shape[1], -1, size)
    scores = torch.matmul(folded, k.transpose(-1, -2)).float().view(batch, heads, length, -1) * rule.scale
    scores = rule.with_slopes(rule.capped(scores), distance, 1, -1, 1, 1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = rule.softmax(scores, 1, -1, 1, 1).to(v.dtype).reshape(batch, k.shape[1], -1, k.shape[2])
    return torch.matmul(weights, v).view(batch, heads, length, v.shape[-1]).to(dtype)
