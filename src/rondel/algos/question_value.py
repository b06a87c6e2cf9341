"""An advantage that counts a question by how much it still has to teach: how sure the policy is,
how often it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.advantage import GroupNorm
from rondel.algos.scored_samples import ScoredSamples, over_group
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


@dataclass(frozen=True)
class QuestionValue(GroupNorm):
    """A_i = (v + delta)·(r_i - mean) / (std + eps) over its group, v = c·(1 - 4·(d - 1/2)²).  -> [N].  arXiv:2606.07950
    (CoDaPO).

    c = exp of the mean over the group's answers of the mean over their tokens of log pi_behavior; d = 1 - the share of
    right answers. v is largest where half of the answers are right and the policy is sure of what it writes; delta is
    what a question counts that is all right or all wrong, where another part of the reward tells its answers apart. It
    assumes that confidence shows that a question is within reach.

    eps      added to the standard deviation
    delta    what every question counts
    part     part of the reward that says whether an answer is right; empty, the reward itself, before shaping
    above    an answer is right where that is above this
    """

    delta: float = 0.1
    part: str = ""
    above: float = 0.5
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})
    probability: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delta >= 0:
            raise ConfigError(f"delta = {self.delta}; it must not be negative: advantages would change their sign")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return (self.values_N(scored) + self.delta) * super().__call__(scored)

    def values_N(self, scored: ScoredSamples) -> Tensor:
        """v of its group.  -> [N]."""
        assert scored.behavior_T is not None, "the log-probabilities of the behavior are not known"
        group_N, written_N = scored.group_N, (scored.lengths_N > 0).to(scored.rewards_N.dtype)
        sure_N = scored.sum_by_sample(scored.behavior_T.to(written_N.dtype)) / scored.lengths_N.clamp(min=1)
        share_N = over_group(written_N, group_N, "sum").clamp(min=1)
        confidence_N = (over_group(sure_N * written_N, group_N, "sum") / share_N).exp()
        wrong_N = 1 - over_group((self._right_N(scored) > self.above).to(written_N.dtype), group_N, "mean")
        return confidence_N * (1 - 4 * (wrong_N - 0.5).square())

    def _right_N(self, scored: ScoredSamples) -> Tensor:
        if not self.part:
            return scored.given_N
        if self.part not in scored.parts:
            raise ConfigError(
                f"algo.advantage.part = '{self.part}': the reward has no such part; it has: "
                f"{', '.join(scored.parts) or 'none'}. Name one of them, or leave it empty for the reward itself"
            )
        return torch.nan_to_num(scored.parts[self.part], nan=0.0)

    def __str__(self) -> str:
        right = f"'{self.part}'" if self.part else "reward"
        return (
            f"(v + {self.delta:g})·{super().__str__()}, v = confidence·(1 - 4·(share of {right} > {self.above:g} "
            "- 1/2)²)"
        )
