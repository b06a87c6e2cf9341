"""What every trained token has earned: known once the step's tokens are annotated,
and for the whole step at once (law 3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rondel.algos.discount import discounted_returns
from rondel.algos.tensors import Tensor
from rondel.algos.value import explained_variance
from rondel.core.errors import ConfigError
from rondel.train.pack import TrainBatch

if TYPE_CHECKING:
    from rondel.algos.scored_samples import ScoredSamples
    from rondel.algos.table import Algorithm


def compute_advantages(batch: TrainBatch, row: Algorithm) -> dict[str, float]:
    """Write every sample's advantages, and what a critic is to learn as their
    "returns". -> metrics: how much of it the critic knew, and how far the policy is from its
    teacher (mean of log pi_behavior - log pi_teacher,
    an estimate of the reverse KL a token)."""
    branches = [s for s in batch.samples if s.parent is not None]
    if branches:
        _refuse_by_token(row, batch)
        batch = TrainBatch([s for s in batch.samples if s.parent is None])
    scored = batch.scored_samples
    batch.write_tokens(advantages=advantages_of(row, scored))
    roots = {(s.group, s.index): s for s in batch.samples}
    for branch in branches:
        assert branch.parent is not None
        earned = roots[branch.group, branch.parent].known.advantages
        assert earned is not None
        branch.known.advantages = earned[:1].repeat(len(branch.trainable))
    told = {}
    if scored.teacher_T is not None and scored.behavior_T is not None:
        told["train/kl_teacher"] = float((scored.behavior_T - scored.teacher_T).mean())
    if "values" not in row.needs:
        return told
    returns_T = returns_of(row, scored)
    batch.write_tokens(returns=returns_T)
    assert scored.values_T is not None, "the row needs values"
    known = explained_variance(scored.values_T, returns_T)
    return told if known is None else told | {"train/explained_variance": known}


def advantages_of(row: Algorithm, scored: ScoredSamples) -> Tensor:
    """The advantage of every trainable token, in the order of the samples.  -> [T]."""
    found = row.advantage(scored if row.takes_rewards else with_shaped_rewards(row, scored))
    found_T = found if row.advantage.per_token else scored.spread_to_tokens(found)
    return charge_advantages(row, found_T, scored) if row.charges_advantages else found_T


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


def _refuse_by_token(row: Algorithm, batch: TrainBatch) -> None:
    """An episode has one number for all its branches, where it has one."""
    by_token = (
        row.distill.coef or row.kl.in_reward or row.kl.in_advantage or "values" in row.needs or row.advantage.per_token
    )
    if by_token and "advantage" not in row.idle:
        raise ConfigError(
            f"algo.kind = '{row.name}' gives every token a credit of its own, and this episode has branches "
            f"({batch.sample_name(0)}), which share one "
            "number. Use a row with one advantage a sample (grpo, dr_grpo, rloo, gspo, ...), or an environment that "
            "does not rewrite its history"
        )
