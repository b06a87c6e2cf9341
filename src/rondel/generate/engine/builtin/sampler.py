"""One token a row, and the logarithm of the probability with which it was really drawn.

    logits -> bias -> penalties -> grammar -> min_tokens -> / temperature -> top-k -> top-p -> min-p -> draw
              `------------- logits_processors.py --------------´    `----------- weights ------------´    choose

Every step sees what the one before left, and the stored logprob is that of the last
distribution (law 4). Noise is counter-based: token t of a sample comes from Philox(key,
t), so it does not depend on scheduling. One
uniform is mapped through the inverse of the cumulative distribution, in two levels: first
a block of the vocabulary, then inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.core.errors import EngineError
from rondel.core.types import Sampling
from rondel.models.cache_pools import upload
from rondel.models.cpu_kernels import draw_rows, has_kernels

WORD = 2**64 - 1
PHILOX = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
WEYL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
HALF, LOW = np.uint64(32), np.uint64(2**32 - 1)
BLOCK = 256
LIKELY = 1024  # top-p sorts so many of a row first, and the whole row only where they do not suffice


def draw_uniform(key: int, t: int, word: int = 0) -> float:
    """The t-th uniform of a sample, in [0, 1) with 53 bits. `word` 1 to 3 are others of
    the same block, for guesses (draft.py).

    The generator is numpy's: Philox 4x64 with ten rounds, `Philox(key=key, counter=t).random_raw(4)[word]`. Making an
    object of numpy for one number takes three times as long.
    """
    a, b, c, d = t + 1, 0, 0, 0
    k, n = key & WORD, key >> 64
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k, right & WORD, (left >> 64) ^ d ^ n, left & WORD
        k, n = (k + 0x9E3779B97F4A7C15) & WORD, (n + 0xBB67AE8584CAA73B) & WORD
    return ((a, b, c, d)[word] >> 11) * 2.0**-53


FEW = 8  # numbers up to which Python is as fast as numpy


def draw_uniforms(keys: Sequence[int], ts: Sequence[int]) -> list[float]:
    """`draw_uniform` of each key and t, all at once: ten rounds over arrays instead of ten for each."""
    if len(keys) <= FEW:
        return [draw_uniform(key, t) for key, t in zip(keys, ts, strict=True)]
    a = np.array(ts, np.uint64) + np.uint64(1)
    b, c, d = (np.zeros(len(keys), np.uint64) for _ in range(3))
    k, n = (np.array([key >> bits & WORD for key in keys], np.uint64) for bits in (0, 64))
    for _ in range(10):
        (left_high, left), (right_high, right) = _wide_product(PHILOX[0], a), _wide_product(PHILOX[1], c)
        a, b, c, d = right_high ^ b ^ k, right, left_high ^ d ^ n, left
        k, n = k + WEYL[0], n + WEYL[1]
    return ((a >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()


def draw_beside(key: int, t: int, count: int) -> np.ndarray:
    """`count` uniforms beside the t-th of a sample, from blocks that no other draw reads."""
    blocks = -(-count // 4)
    a, b = np.full(blocks, t + 1, np.uint64), np.arange(1, blocks + 1, dtype=np.uint64)
    c, d = np.zeros(blocks, np.uint64), np.zeros(blocks, np.uint64)
    k, n = (np.full(blocks, key >> bits & WORD, np.uint64) for bits in (0, 64))
    for _ in range(10):
        (left_high, left), (right_high, right) = _wide_product(PHILOX[0], a), _wide_product(PHILOX[1], c)
        a, b, c, d = right_high ^ b ^ k, right, left_high ^ d ^ n, left
        k, n = k + WEYL[0], n + WEYL[1]
    return (np.stack([a, b, c, d], -1).reshape(-1)[:count] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _wide_product(factor: np.uint64, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> the high and the low 64 bits of factor · x, by products of 32 bits."""
    high, low, x_high, x_low = factor >> HALF, factor & LOW, x >> HALF, x & LOW
    first = high * x_low + (low * x_low >> HALF)
    second = low * x_high + (first & LOW)
    return high * x_high + (first >> HALF) + (second >> HALF), factor * x


def sampling_weights(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """Logits [B, V] fp32 (overwritten) -> what is drawn from, not normalised [B, V]: the
    largest of a row is 1, what is cut is 0.

    Greedy rows are not truncated; their logprob is that of temperature 1, and they are not trainable (law 4).
    """
    p = logits.sub_(logits.amax(-1, keepdim=True))  # NaN where a logit is not finite: `sample_tokens` refuses these
    if any(s.temperature not in (0, 1) for s in samplings):
        p.div_(upload([s.temperature or 1.0 for s in samplings], p.device)[:, None])
    p.exp_()
    cuts: tuple[tuple[Callable[[Tensor, Sequence[float]], Tensor], list[float]], ...] = (
        (_top_k, [s.top_k if s.top_k < p.shape[1] and s.temperature else 0 for s in samplings]),
        (_top_p, [s.top_p if s.top_p < 1 and s.temperature else 0 for s in samplings]),
        (_min_p, [s.min_p if s.temperature else 0 for s in samplings]),
    )
    for cut, wanted in cuts:
        if rows := [row for row, value in enumerate(wanted) if value]:
            at = upload(rows, p.device)
            kept = p if len(rows) == len(p) else p[at]
            # [R, 1]; ties with it stay
            least = cut(kept, [wanted[row] for row in rows])
            kept.masked_fill_(kept < least, 0.0)
            if kept is not p:
                p[at] = kept
    return p


def sample_tokens(p: Tensor, samplings: list[Sampling], noise: list[float]) -> tuple[list[int], list[float]]:
    """Weights [B, V], a uniform for each row -> (tokens, log-probabilities under the distribution drawn from).

    A GPU is waited for once. Raises EngineError where the logits were not finite.
    """
    return read_draws(draw_tokens(p, samplings, noise))


def weighed_rows(logits: Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """Rows of logits [B, V] that need `sampling_weights`: those of whose distribution something is cut, and all where no
    kernel of this CPU draws from logits as they are. The other rows have no say, so a row has the same bits in every
    company.
    """
    if logits.dtype != torch.float32 or not has_kernels(logits):
        return list(range(len(samplings)))
    return [row for row, s in enumerate(samplings) if s.truncates_support and s.temperature > 0]


def draw_from(
    logits: Tensor, samplings: Sequence[Sampling], noise: Sequence[float], weighed: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits [B, V] fp32 (overwritten) -> [3, B] as `draw_tokens`, and the weights [W, V] of the rows that are `weighed`,
    in their order; all of `weighed_rows` must be.
    """
    whole = sorted(set(range(len(samplings))) - set(weighed))
    if not weighed:
        return draw_rows(logits, [s.temperature for s in samplings], noise), logits[:0]
    p = sampling_weights(logits[weighed] if whole else logits, [samplings[row] for row in weighed])
    drawn = draw_tokens(p, [samplings[row] for row in weighed], [noise[row] for row in weighed])
    if not whole:
        return drawn, p
    out = torch.empty(3, len(samplings), dtype=torch.float64)
    out[:, weighed] = drawn
    out[:, whole] = draw_rows(logits[whole], [samplings[row].temperature for row in whole], [noise[r] for r in whole])
    return out, p


def draw_tokens(p: Tensor, samplings: list[Sampling], noise: list[float]) -> Tensor:
    """The same on the device of the weights: [3, B] float64, tokens, log-probabilities and masses. Nothing waits."""
    chosen, total = _inverse_cdf(p, upload(noise, p.device, torch.float64))
    chosen.clamp_max_(p.shape[1] - 1)  # among NaN no aim is found
    if greedy := [row for row, s in enumerate(samplings) if s.temperature == 0]:
        at = upload(greedy, p.device)
        chosen[at] = p[at].argmax(-1)  # the first of the largest, whose weight is 1
    logprobs = (p.gather(1, chosen[:, None])[:, 0].double() / total).log().clamp_max_(0.0)
    return torch.stack([chosen.double(), logprobs, total])


def read_draws(drawn: Tensor) -> tuple[list[int], list[float]]:
    """[3, B] of `draw_tokens`, on the host -> (tokens, log-probabilities)."""
    tokens, logprobs, masses = drawn.tolist()
    if any(map(math.isnan, masses)):
        raise EngineError("the model's logits are not finite: its weights or activations have overflowed")
    return [int(token) for token in tokens], logprobs


def draw_more(p: Tensor, uniforms: np.ndarray) -> tuple[Tensor, Tensor]:
    """Weights [V] -> one id for each uniform, drawn with replacement, and their log-probabilities, [M] each."""
    upto = p.double().cumsum(0)
    total = upto[-1]
    aim = torch.minimum(
        torch.from_numpy(uniforms).to(p.device) * total, total.nextafter(torch.zeros_like(total))
    )  # rounding never reaches what lies behind the last weight
    ids = torch.searchsorted(upto, aim, right=True)
    return ids, (p[ids].double() / total).log().clamp_max_(0.0)


def _inverse_cdf(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest index whose cumulative weight exceeds u times the total. p [B, V]
    unnormalised, u [B] -> (index [B], total [B]).

    Only the sums of blocks are carried over the whole vocabulary in double precision;
    inside a block the aim is its share of the block, so that rounding between the two
    levels can never choose an entry of weight 0.
    """
    vocab = p.shape[1]
    blocks = (F.pad(p, (0, -vocab % BLOCK)) if vocab % BLOCK else p).unflatten(1, (-1, BLOCK))
    mass = blocks.sum(-1).double()  # [B, V/BLOCK]
    upto = mass.cumsum(-1)
    aim = u[:, None] * upto[:, -1:]
    block = torch.searchsorted(upto, aim, right=True).clamp_max_(mass.shape[1] - 1)
    own = mass.gather(1, block)
    share = ((aim - (upto.gather(1, block) - own)) / own).clamp_(0, 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    whole = inside[:, -1:]
    within = torch.searchsorted(
        inside, torch.minimum(share * whole, whole.nextafter(torch.zeros_like(whole))), right=True
    )
    return (block * BLOCK + within)[:, 0], upto[:, -1]


# -- the smallest weight that stays: [R, V], R numbers -> [R, 1] ------------------------------------------


def _top_k(p: Tensor, k: Sequence[float]) -> Tensor:
    """The k-th largest.  arXiv:1805.04833."""
    return p.topk(int(max(k))).values.gather(1, upload(k, p.device, torch.int64)[:, None] - 1)


def _top_p(p: Tensor, share: Sequence[float]) -> Tensor:
    """The last of the largest that together reach the share.  arXiv:1904.09751. A row's
    answer does not depend on its batch.
    """
    goal = upload(share, p.device, torch.float64) * p.sum(-1, dtype=torch.float64)
    least = torch.empty(len(p), 1, device=p.device)
    rows = torch.arange(len(p), device=p.device)
    for n in (min(LIKELY, p.shape[1]), p.shape[1]):
        ordered = p[rows].topk(n).values if n < p.shape[1] else p[rows].sort(descending=True).values
        before = ordered.double().cumsum(-1) - ordered
        kept = (before < goal[rows, None]).sum(-1).clamp_min_(1)
        least[rows] = ordered.gather(1, kept[:, None] - 1)
        rows = rows[kept == n]  # all of them were needed: perhaps more are
        if n == p.shape[1] or not len(rows):
            break
    return least


def _min_p(p: Tensor, share: Sequence[float]) -> Tensor:
    """A share of the largest, which is 1.  arXiv:2407.01082."""
    return upload(share, p.device, torch.float32)[:, None]
