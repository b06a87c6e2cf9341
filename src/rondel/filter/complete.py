"""A group whose samples could not be scored is a failure of the world, not a judgement of the policy (law 11)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rondel.core.errors import ConfigError
from rondel.core.types import KEEP, EnvFault, Failed, Group, Trajectory, Verdict


@dataclass(frozen=True)
class Complete:
    """Book the group as failed when fewer than `at_least` of its trajectories were
    scored; the commonest reason names it.

    at_least    scored trajectories a baseline needs: 2, or 1 where the group size is 1
    greedy      whether its greedy answer must be scored, too
    """

    at_least: int = 2
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.at_least >= 1:
            raise ConfigError(f"at_least = {self.at_least}; a group without a scored trajectory cannot be trained")

    def __call__(self, group: Group) -> Verdict:
        if len(group.rewards) >= self.at_least and not (self.greedy and group.baseline is None):
            return KEEP
        unscored = [t for t in group.trajectories if t.reward is None]
        reasons = Counter(map(_failure_reason, unscored))
        if not reasons:
            return Verdict(False, "too few samples", failed=True)
        reason = reasons.most_common(1)[0][0]
        details = (t.score.detail for t in unscored if isinstance(t.score, Failed) and _failure_reason(t) == reason)
        return Verdict(False, reason, failed=True, detail=next(details, ""))


def _failure_reason(trajectory: Trajectory) -> str:
    match trajectory:
        case Trajectory(score=Failed(reason=reason)) | Trajectory(outcome=EnvFault(reason=reason)):
            return reason
    return "unscored"
