"""Credit along time: a token's advantage from the rewards and values that follow it in its sample.

T trainable tokens, those of one sample side by side and in order · `sample_T` int64, the same number
along a sample · `length_N` how long each is, never 0 What the policy only read is not among the
T, so an observation cannot change an advantage:
behind a token comes the next one it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.bounds import check_shares
from rondel.algos.component import Component
from rondel.algos.discount import discounted_returns, gae
from rondel.algos.scored_samples import ScoredSamples, whiten_values
from rondel.algos.tensors import Tensor


@dataclass(frozen=True)
class Gae(Component):
    """A_t = sum over k >= 0 of (gamma·lam)^k·(r_{t+k} + gamma·V_{t+k+1} - V_{t+k}).  -> [T].  arXiv:1506.02438.

    r_t is what token t earned, V_t what the critic expected before it. Behind the last token nothing is expected, but
    where a world cut the episode off: there V is that of what it showed then. The critic learns A + V,
    before whitening.

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
            after_N=scored.value_after_N,
        )

    def __str__(self) -> str:
        text = (
            f"sum of ({self.gamma * self.lam:g})^k·d over the k tokens that follow, "
            f"d = reward + {self.gamma:g}·V of the next token - V"
        )
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
