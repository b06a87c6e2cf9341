"""What every trained token has earned: known once the step's tokens are annotated,
and for the whole step at once (law 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.algos.value import explained_variance
from rondel.core.errors import ConfigError
from rondel.train.pack import TrainBatch

if TYPE_CHECKING:
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
    batch.write_tokens(advantages=row.advantages_T(scored))
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
    returns_T = row.returns_T(scored)
    batch.write_tokens(returns=returns_T)
    assert scored.values_T is not None, "the row needs values"
    known = explained_variance(scored.values_T, returns_T)
    return told if known is None else told | {"train/explained_variance": known}


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
