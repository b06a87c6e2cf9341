"""Advantages along an episode without or with a critic: by turns, or by the place of a token. A turn is what the policy
wrote between two observations.

K turns · T trainable tokens, those of a turn side by side. `ScoredSamples.turn_T` says whose turn a token is of,
`state_T` what the policy saw before that turn: turns of one group with the same number saw the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.bounds import check_shares
from rondel.algos.component import Component
from rondel.algos.discount import discounted_returns, gae, sample_lengths
from rondel.algos.gae import Gae
from rondel.algos.scored_samples import (
    ScoredSamples,
    group_deviations,
    group_sizes,
    over_group,
    standardize_rewards,
)
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


@dataclass(frozen=True)
class Turns:
    """The turns of all samples, in their order."""

    lengths_K: Tensor  # tokens of each
    first_K: Tensor  # the place of its first token
    sample_K: Tensor
    earned_K: Tensor  # what its tokens earned

    @classmethod
    def of(cls, scored: ScoredSamples) -> Turns:
        turn_T = scored.sample_T if scored.turn_T is None else scored.turn_T
        lengths_K = sample_lengths(turn_T) if len(turn_T) else turn_T
        first_K, earned_T = lengths_K.cumsum(0) - lengths_K, scored.token_rewards
        number_T = torch.arange(len(lengths_K), device=turn_T.device).repeat_interleave(lengths_K)
        earned_K = earned_T.new_zeros(len(lengths_K)).index_add(0, number_T, earned_T)
        return cls(lengths_K, first_K, scored.sample_T[first_K], earned_K)

    def spread(self, values_K: Tensor) -> Tensor:
        """Every token gets the value of its turn.  [K] -> [T]."""
        return values_K.repeat_interleave(self.lengths_K)


@dataclass(frozen=True)
class StepGroups(Component):
    """A_t = (R - mean) / (std + eps) over its group + weight·(G - mean) / (std + eps) over the turns that began in the
    same state.  -> [T].  arXiv:2505.10978 (GiGPO).

    G = r_k + gamma·G of the next turn, what the turn and those behind it earned. Turns of one group that saw the same
    observation are compared, in whichever episode and whenever they came; a turn whose state no other saw has the first
    term only. The state is what the policy was shown just before the turn, not all that went before.

    weight    of the turns' own advantages beside the episode's
    gamma     what a reward one turn later is worth
    divide    by the standard deviations; false only centers
    eps       added to the standard deviations
    """

    weight: float = 1.0
    gamma: float = 0.95
    divide: bool = True
    eps: float = 1e-6
    per_token: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_shares(gamma=self.gamma)
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or a constant group would divide 0 by 0")
        if not self.weight >= 0:
            raise ConfigError(f"weight = {self.weight}; it must not be negative: good turns would be unlearned")

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        idle = {} if self.weight else {"gamma": "advantage.weight is 0"}
        return idle if self.divide else idle | {"eps": "advantage.divide is false"}

    def _compare(self, values: Tensor, group: Tensor) -> Tensor:
        return standardize_rewards(values, group, self.eps) if self.divide else group_deviations(values, group)

    def __call__(self, scored: ScoredSamples) -> Tensor:
        turns = Turns.of(scored)
        if not len(turns.lengths_K):
            return scored.token_rewards
        state_T = scored.spread_to_tokens(scored.group_N) if scored.state_T is None else scored.state_T
        returns_K = discounted_returns(turns.earned_K, turns.sample_K, gamma=self.gamma)
        own_K = self._compare(returns_K, state_T[turns.first_K])
        whole_N = self._compare(scored.rewards_N, scored.group_N)
        return scored.spread_to_tokens(whole_N) + self.weight * turns.spread(own_K)

    def __str__(self) -> str:
        over = f" / (std + {self.eps:g})" if self.divide else ""
        return (
            f"(R - mean){over} over its group + {self.weight:g}·(G - mean){over} over the turns that began in the same "
            f"state, G = sum of {self.gamma:g}^k·reward over the k turns that follow"
        )


@dataclass(frozen=True)
class TokenBaseline(Component):
    """A_t = G_t - sum of W_t·G_t / sum of W_t over the answers of its group that have a t-th token.  -> [T].
    arXiv:2602.07078 (OTB).

    G_t is what token t and those behind it earned, W_t = sum over j <= t of (1 - 2·pi_j + sum of pi²) the squared
    gradients of the logits so far: the baseline of least variance at that place, for an answer that was undecided so
    far varies most. Where no other answer is as long the baseline is 0, as verl has it, so the end of the longest one
    gets G itself.

    tail    false: the end of an answer that no other reaches gets 0 instead
    """

    tail: bool = True
    per_token: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"proximal_logprobs", "collisions"})

    def __call__(self, scored: ScoredSamples) -> Tensor:
        earned_T, sample_T = scored.token_rewards, scored.sample_T
        if not len(earned_T):
            return earned_T
        assert scored.proximal_T is not None and scored.collision_T is not None
        lengths_N = sample_lengths(sample_T)
        place_T = torch.arange(len(sample_T), device=sample_T.device)
        place_T = place_T - (lengths_N.cumsum(0) - lengths_N).repeat_interleave(lengths_N)
        returns_T = discounted_returns(earned_T, sample_T, gamma=1.0)
        energy_T = (1 - 2 * scored.proximal_T.exp() + scored.collision_T).to(earned_T.dtype)
        # the sum up to a token is the whole less what follows it
        left_T = discounted_returns(energy_T, sample_T, gamma=1.0)
        weight_T = over_group(energy_T, sample_T, "sum") - left_T + energy_T
        group_T = scored.spread_to_tokens(scored.group_N.unique(return_inverse=True)[1])
        at_T = group_T * (int(place_T.max()) + 1) + place_T
        total_T = over_group(weight_T, at_T, "sum").clamp(min=1e-12)
        baseline_T = over_group(weight_T * returns_T, at_T, "sum") / total_T
        alone_T = group_sizes(earned_T, at_T) == 1
        return torch.where(alone_T, returns_T if self.tail else 0.0, returns_T - baseline_T)

    def __str__(self) -> str:
        return (
            "G - mean of G over its group at the same place, weighed by the squared gradients of the logits so far, G "
            "= the rewards of the token and of those behind it"
        )


@dataclass(frozen=True)
class TurnGae(Gae):
    """A = sum over k >= 0 of (gamma·lam)^k·(r_{j+k} + gamma·V_{j+k+1} - V_{j+k}), j, k turns; every token of a turn
    has it.

    -> [T].  arXiv:1506.02438 with a turn for a step, as AReaL's gae_timestep_unit = turn. r is what the turn's tokens
    earned, V what the critic expected before its first one. The critic learns A + V at every token of the turn, so it
    is asked what an episode is worth at its turns, and long turns discount nothing.

    gamma     what a reward one turn later is worth
    lam       0 trusts the critic alone, 1 the rewards alone
    whiten    advantages of the whole step with mean 0 and variance 1, over its tokens
    """

    def _compute_gae(self, scored: ScoredSamples) -> tuple[Tensor, Tensor]:
        assert scored.values_T is not None, "no critic has said what it expects"
        turns = Turns.of(scored)
        values_K = scored.values_T.to(scored.rewards_N.dtype)[turns.first_K]
        found = gae(
            turns.earned_K,
            values_K,
            turns.sample_K,
            gamma=self.gamma,
            lam=self.lam,
            after_N=scored.value_after_N,
        )
        return turns.spread(found[0]), turns.spread(found[1])

    def __str__(self) -> str:
        text = (
            f"sum of ({self.gamma * self.lam:g})^k·d over the k turns that follow, "
            f"d = reward + {self.gamma:g}·V of the next turn - V"
        )
        return f"({text}), whitened over the step" if self.whiten else text
