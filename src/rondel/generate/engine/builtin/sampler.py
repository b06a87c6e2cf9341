"""One token a row, and the logarithm of the probability with which it was really drawn.

Noise is counter-based: token t of a sample comes from Philox(key, t), so it does not depend on scheduling. One uniform is
mapped through the inverse of the cumulative distribution, in two levels: first a block of the vocabulary, then inside it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.words.errors import EngineError
from rondel.words.types import Sampling

BLOCK = 256


def uniform(key: int, t: int) -> float:
    """The t-th uniform of a sample, in [0, 1) with 53 bits."""
    return (int(np.random.Philox(key=key, counter=t).random_raw()) >> 11) * 2.0**-53


def draw(logits: Tensor, samplings: list[Sampling], noise: list[float]) -> tuple[list[int], list[float]]:
    """logits [B, V] fp32 (overwritten) -> (tokens, log-probabilities under the distribution drawn from).

    Greedy rows take the largest logit; their logprob is that of temperature 1, and they are not trainable (law 4).
    """
    device = logits.device
    temperature = torch.tensor([s.temperature or 1.0 for s in samplings], device=device)
    if bool((temperature != 1).any()):
        logits.div_(temperature[:, None])
    top = logits.amax(-1, keepdim=True)
    if not bool(top.isfinite().all()):
        raise EngineError("the model's logits are not finite: its weights or activations have overflowed")
    p = logits.sub_(top).exp_()
    greedy = [row for row, s in enumerate(samplings) if s.temperature == 0]
    best = p[greedy].argmax(-1) if greedy else None  # the first of the largest, whose p is 1
    for row, sampling in enumerate(samplings):
        if sampling.truncated and sampling.temperature > 0:
            _truncate(p[row], sampling)
    chosen, total = _inverse_cdf(p, torch.tensor(noise, dtype=torch.float64, device=device))
    if best is not None:
        chosen[greedy] = best
    logprobs = (p.gather(1, chosen[:, None])[:, 0].double() / total).log()
    return chosen.tolist(), logprobs.clamp_max_(0.0).tolist()


def _inverse_cdf(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest index whose cumulative weight exceeds u times the total. p [B, V] unnormalised, u [B] -> (index [B], total [B]).

    Only the sums of blocks are carried over the whole vocabulary in double precision; inside a block the aim is its share of the
    block, so that rounding between the two levels can never choose an entry of weight 0.
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
    within = torch.searchsorted(inside, torch.minimum(share * whole, whole.nextafter(torch.zeros_like(whole))), right=True)
    return (block * BLOCK + within)[:, 0], upto[:, -1]


def _truncate(p: Tensor, sampling: Sampling) -> None:
    """Zero what top-k, top-p and min-p remove, in that order, in place. p [V], largest entry 1."""
    if 0 < sampling.top_k < len(p):
        p[p < p.topk(sampling.top_k).values[-1]] = 0.0  # ties with the k-th stay
    if sampling.top_p < 1:
        ordered, index = p.sort(descending=True, stable=True)
        mass = ordered.double().cumsum(0)
        keep = int((mass - ordered < sampling.top_p * mass[-1]).sum())
        p[index[keep:]] = 0.0
    if sampling.min_p > 0:
        p[p < sampling.min_p] = 0.0
