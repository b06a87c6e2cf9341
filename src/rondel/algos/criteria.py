"""Credit by criterion: tokens that a hint at what the answer did well makes likelier earn more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from rondel.algos.distill import Distill
from rondel.algos.scored_samples import ScoredSamples, group_deviations, over_group
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


@dataclass(frozen=True)
class CriterionBonus(Distill):
    """A_t' = A_t + coef·sum over criteria of a_c·[t is chosen by c], a_c = s_c - mean of its group, where above 0.  [T]
    -> [T].  arXiv:2607.18082 (CriPO-S).

    s_c is a part of the reward. The policy scores the answer again where it reads a hint at the criterion
    (`model.teacher = [{ context = ... }]`): a token is chosen if it is likelier there than when it was drawn, and still
    at most `threshold` times as likely as the best one. Of the criteria of a group only the `most` with the largest
    credit count. The assumption is that what a hint makes likelier is what earned the criterion; a token that the hint
    makes certain would have come anyway.

    coef         what a chosen token earns of the credit of its criterion; 0 leaves criteria out
    threshold    of the best token's probability, above which a token is not chosen
    most         criteria of a group that count
    criteria     part of the reward -> place of its hint in model.teacher, from 0
    """

    coef: float = 0.1
    threshold: float = 0.1
    most: int = 3
    criteria: dict[str, float] = field(default_factory=dict)
    asks: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs", "criterion_margins"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold = {self.threshold}; it must lie in (0, 1]: a share of the best probability")
        if not self.most >= 1:
            raise ConfigError(f"most = {self.most}; at least one criterion must count")
        if odd := next((name for name, place in self.criteria.items() if place < 0 or place != int(place)), None):
            raise ConfigError(
                f"criteria.{odd} = {self.criteria[odd]:g}; write the place of its hint in model.teacher: 0, 1, ..."
            )

    @property
    def needs(self) -> frozenset[str]:
        return self.asks if self.coef and self.criteria else frozenset()

    def shape_advantages(self, advantages_T: Tensor, scored: ScoredSamples) -> Tensor:
        for name, credit_N in self.credits_N(scored).items():
            margin_T = scored.margins[int(self.criteria[name])].to(advantages_T.dtype)
            chosen_T = (margin_T >= 0) & (margin_T > -math.log(self.threshold))
            advantages_T = advantages_T + torch.where(chosen_T, self.coef * scored.spread_to_tokens(credit_N), 0.0)
        return advantages_T

    def credits_N(self, scored: ScoredSamples) -> dict[str, Tensor]:
        """What each criterion gives a sample where its part is above the group's mean and the criterion counts,
        else 0."""
        missing = [name for name in self.criteria if name not in scored.parts]
        if missing:
            raise ConfigError(
                f"algo.distill.criteria.{missing[0]}: the reward has no such part; it has: "
                f"{', '.join(scored.parts) or 'none'}. Let it return {{ {missing[0]}: value, ... }}"
            )
        names = sorted(self.criteria)
        own = {name: group_deviations(torch.nan_to_num(scored.parts[name]), scored.group_N) for name in names}
        largest = {name: over_group(own[name], scored.group_N, "amax") for name in names}
        found = {}
        for place, name in enumerate(names):
            ahead_N = sum(
                ((largest[other] > largest[name]) | ((largest[other] == largest[name]) & (before < place))).long()
                for before, other in enumerate(names)
                if other != name
            )
            counts_N = (own[name] > 0) & (ahead_N < self.most)
            found[name] = torch.where(counts_N, own[name], 0.0)
        return found

    def __str__(self) -> str:
        return (
            f"{self.coef:g}·credit of each criterion for tokens that its hint makes likelier, below {self.threshold:g} "
            "of the best; A + d takes the place of A"
        )
