"""Rewards that a row shapes or charges before they are advantages, what its critic learns from them, and what it
charges the advantages themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rondel.algos.discount import discounted_returns
from rondel.algos.tensors import Tensor

if TYPE_CHECKING:
    from rondel.algos.scored_samples import ScoredSamples
    from rondel.algos.table import Algorithm


def returns_of(row: Algorithm, scored: ScoredSamples) -> Tensor:
    """What the critic of a row with one is to learn.  -> [T]."""
    return row.advantage.returns(with_shaped_rewards(row, scored))


def with_shaped_rewards(row: Algorithm, scored: ScoredSamples) -> ScoredSamples:
    """Rewards, shaped and charged with the KL: `rewards_N`, and the same by token in
    `earned_T`. What shaping changes is due at the end.
    """
    shaped_N = row.shaping(scored)
    earned_T = scored.token_rewards + scored.at_end(shaped_N - scored.rewards_N)
    if row.kl.in_reward:
        assert scored.behavior_T is not None and scored.ref_T is not None
        cost_T = row.kl.token_cost(scored.behavior_T, scored.ref_T).to(earned_T.dtype)
        earned_T, shaped_N = earned_T - cost_T, shaped_N - scored.sum_by_sample(cost_T)
    return replace(scored, rewards_N=shaped_N, earned_T=earned_T, unshaped_N=scored.given_N)


def charge_advantages(row: Algorithm, found_T: Tensor, scored: ScoredSamples) -> Tensor:
    """Advantages [T], less what tokens pay of them: for a KL, or for what a teacher says."""
    if row.kl.in_advantage:
        assert scored.behavior_T is not None and scored.ref_T is not None
        cost_T = row.kl.token_cost(scored.behavior_T, scored.ref_T).to(found_T.dtype)
        found_T = found_T - discounted_returns(cost_T, scored.sample_T, gamma=1.0)
    return found_T if row.charged_distill is None else row.charged_distill.shape_advantages(found_T, scored)
