"""Credit along time: a token's advantage from the rewards and values that follow it in its sample.

T trainable tokens, those of one sample side by side and in order · `sample_T` int64, the same number
along a sample · `length_N` how long each is, never 0 What the policy only read is not among the
T, so an observation cannot change an advantage:
behind a token comes the next one it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.advantage import whiten_values
from rondel.algos.component import Component
from rondel.algos.scored_samples import ScoredSamples
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError

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


def gae(rewards_T: Tensor, values_T: Tensor, sample_T: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = d_t + gamma·lam·A_{t+1} with d_t = r_t + gamma·V_{t+1} - V_t; returns = A + V.
    [T], [T], [T] -> [T], [T].  arXiv:1506.02438.

    A sample ends where its tokens end: the value behind the last one is 0, whether it was stopped or cut off.
    """
    if not len(rewards_T):
        return rewards_T, rewards_T
    length_N = sample_lengths(sample_T)
    deltas_T = rewards_T.add(next_values(values_T, length_N), alpha=gamma).sub_(values_T)
    advantages_T = discounted_sums(deltas_T, length_N, gamma * lam)
    return advantages_T, advantages_T + values_T


def discounted_returns(rewards_T: Tensor, sample_T: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma·G_{t+1} within a sample.  [T], [T] -> [T]."""
    return discounted_sums(rewards_T, sample_lengths(sample_T), gamma) if len(rewards_T) else rewards_T


def sample_lengths(sample_T: Tensor) -> Tensor:
    """How many tokens stand together.  [T] -> [N], none of them 0."""
    return sample_T.unique_consecutive(return_counts=True)[1]


@dataclass(frozen=True)
class Gae(Component):
    """A_t = sum over k >= 0 of (gamma·lam)^k·(r_{t+k} + gamma·V_{t+k+1} - V_{t+k}).  -> [T].  arXiv:1506.02438.

    r_t is what token t earned, V_t what the critic expected before it; nothing is expected
    behind the last token. The critic learns A + V, before whitening.

    gamma     what a reward one token later is worth
    lam       0 trusts the critic alone, 1 the rewards alone
    whiten    advantages of the whole step with mean 0 and variance 1
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    per_token: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"values"})

    def __post_init__(self) -> None:
        check_shares(gamma=self.gamma, lam=self.lam)

    def __call__(self, scored: ScoredSamples) -> Tensor:
        advantages_T, _ = self._compute_gae(scored)
        return whiten_values(advantages_T) if self.whiten else advantages_T

    def returns(self, scored: ScoredSamples) -> Tensor:
        """What the critic is to expect of each token.  -> [T]."""
        return self._compute_gae(scored)[1]

    def _compute_gae(self, scored: ScoredSamples) -> tuple[Tensor, Tensor]:
        assert scored.values_T is not None, "no critic has said what it expects"
        return gae(
            scored.token_rewards,
            scored.values_T.to(scored.rewards_N.dtype),
            scored.sample_T,
            gamma=self.gamma,
            lam=self.lam,
        )

    def __str__(self) -> str:
        text = f"sum of ({self.gamma * self.lam:g})^k·d over the k tokens that follow, d = reward + {self.gamma:g}·V of the next token - V"
        return f"({text}), whitened over the step" if self.whiten else text


@dataclass(frozen=True)
class Returns(Component):
    """A_t = G_t = r_t + gamma·G_{t+1}.  -> [T].  arXiv:2501.03262 (REINFORCE++).  No
    critic: the step's mean is the baseline.

    gamma     what a reward one token later is worth
    whiten    advantages of the whole step with mean 0 and variance 1
    """

    gamma: float = 1.0
    whiten: bool = True
    per_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_shares(gamma=self.gamma)

    def __call__(self, scored: ScoredSamples) -> Tensor:
        returns_T = discounted_returns(scored.token_rewards, scored.sample_T, gamma=self.gamma)
        return whiten_values(returns_T) if self.whiten else returns_T

    def __str__(self) -> str:
        text = f"sum of {self.gamma:g}^k·reward over the k tokens that follow"
        return f"({text}), whitened over the step" if self.whiten else text


def check_shares(**knobs: float) -> None:
    """Of what lies in the future."""
    for name, value in knobs.items():
        if not 0 <= value <= 1:
            raise ConfigError(
                f"{name} = {value}; it must lie in [0, 1], or what is far away would count for more than what is near"
            )
