"""Sums along a sample of what comes later, discounted by how much later.

T tokens, those of one sample side by side and in order · `sample_T` int64, the same number along a sample · `length_N`
how long each is, never 0.
"""

from __future__ import annotations

from rondel.algos.tensors import Tensor, torch

CHUNK = 128  # tokens that one matrix product carries at once


def next_values(values_T: Tensor, length_N: Tensor) -> Tensor:
    """v_{t+1} of the same sample, 0 behind its last token.  [T], [N] -> [T]."""
    next_T = torch.empty_like(values_T)
    next_T[:-1] = values_T[1:]
    next_T[length_N.cumsum(0) - 1] = 0
    return next_T


def discounted_sums(x_T: Tensor, length_N: Tensor, w: float) -> Tensor:
    """y_t = x_t + w·y_{t+1} within a sample.  [T], [N] -> [T].  Blelloch 1990 (scans).  Time O(TC), space O(T + C²).

    Every sample is cut into chunks of C tokens: within a chunk y is one product with the
    triangle w^(j-t), j >= t. The heads of the chunks then obey the same rule with w^C, so
    they are discounted by this function, and
    each adds w^(C-t) times the next head.
    """
    size = min(CHUNK, max(2, -(-len(x_T) // len(length_N))))  # short samples fill short chunks
    chunks_N = (length_N + size - 1) // size
    # from a token's index to its place in the chunks
    shift_N = (chunks_N.cumsum(0) - chunks_N) * size - (length_N.cumsum(0) - length_N)
    slot_T = shift_N.repeat_interleave(length_N).add_(torch.arange(len(x_T), device=x_T.device))
    y_KC = x_T.new_zeros(int(chunks_N.sum()) * size).index_copy_(0, slot_T, x_T).view(-1, size)
    power_C = (torch.tensor(w, dtype=torch.float64) ** torch.arange(size + 1)).to(x_T)
    step_C = torch.arange(size, device=x_T.device)
    y_KC = y_KC @ power_C[(step_C[:, None] - step_C).clamp(min=0)].tril()
    if len(y_KC) > len(length_N):
        head_K = discounted_sums(y_KC[:, 0], chunks_N, w**size)
        y_KC.addr_(next_values(head_K, chunks_N), power_C[size - step_C])
    return y_KC.view(-1)[slot_T]


def discounted_returns(rewards_T: Tensor, sample_T: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma·G_{t+1} within a sample.  [T], [T] -> [T]."""
    return discounted_sums(rewards_T, sample_lengths(sample_T), gamma) if len(rewards_T) else rewards_T


def sample_lengths(sample_T: Tensor) -> Tensor:
    """How many tokens stand together.  [T] -> [N], none of them 0."""
    return sample_T.unique_consecutive(return_counts=True)[1]


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    sample_T: Tensor,
    *,
    gamma: float,
    lam: float,
    after_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = d_t + gamma·lam·A_{t+1} with d_t = r_t + gamma·V_{t+1} - V_t; returns = A + V.
    [T], [T], [T] -> [T], [T].  arXiv:1506.02438.

    A sample ends where its tokens end: the value behind the last one is 0, whether it was stopped or cut off. A world
    that cuts an episode off shows a state that goes on: its value is in `after_N`.
    """
    if not len(rewards_T):
        return rewards_T, rewards_T
    length_N = sample_lengths(sample_T)
    next_T = next_values(values_T, length_N)
    if after_N is not None:
        next_T[length_N.cumsum(0) - 1] = after_N.to(next_T)
    deltas_T = rewards_T.add(next_T, alpha=gamma).sub_(values_T)
    advantages_T = discounted_sums(deltas_T, length_N, gamma * lam)
    return advantages_T, advantages_T + values_T
