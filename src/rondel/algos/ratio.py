"""How far the policy has moved from its anchor since the batch was drawn.

The anchor is the proximal policy, which began the step: what lies between it and the
behavior is the correction's. Anchored at the behavior itself (bypass) the ratio spans
both, and no correction is left to make. Anchored at the reference it is how far the policy has come in all; it is then
not 1 at the first update, and a clip would hold the policy there.
"""

from __future__ import annotations

from dataclasses import dataclass

from rondel.algos.component import Component
from rondel.algos.scored_samples import over_group
from rondel.algos.tensors import Tensor
from rondel.core.registry import one_of

NEEDS = {
    "proximal": frozenset[str](),
    "behavior": frozenset({"behavior_logprobs"}),
    "reference": frozenset({"ref_logprobs"}),
}


@dataclass(frozen=True)
class TokenRatio(Component):
    """log r_t = log pi(t) - log pi_anchor(t).  [T], [T] -> [T].  arXiv:1707.06347.  Each token stands for itself.

    anchor    where the ratio starts: proximal, behavior (bypass), or reference
    """

    anchor: str = "proximal"

    def __post_init__(self) -> None:
        one_of("anchor", self.anchor, NEEDS)

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS[self.anchor]

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return log_ratio_T

    def __str__(self) -> str:
        return f"exp(logp - logp_{self.anchor}) of the token"


@dataclass(frozen=True)
class SequenceRatio(TokenRatio):
    """log r_t = mean over its sample of (log pi - log pi_anchor).  [T], [T] -> [T].  arXiv:2507.18071 (GSPO).

    A sample is clipped as a whole, and each of its tokens moves it by its share.

    anchor    where the ratio starts: proximal, behavior (bypass), or reference
    """

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return over_group(log_ratio_T, sample_T, "mean")

    def __str__(self) -> str:
        return f"exp(mean of logp - logp_{self.anchor} over the sample)"


@dataclass(frozen=True)
class SequenceTokenRatio(TokenRatio):
    """log r_t = mean over its sample, as a number, with the gradient of token t alone.  [T],
    [T] -> [T].  arXiv:2507.18071 (GSPO-token).

    The value of the sequence ratio; with one advantage a sample its gradient too. Made for
    advantages that differ within a sample.

    anchor    where the ratio starts: proximal, behavior (bypass), or reference
    """

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return over_group(log_ratio_T.detach(), sample_T, "mean") + log_ratio_T - log_ratio_T.detach()

    def __str__(self) -> str:
        return f"exp(mean of logp - logp_{self.anchor} over the sample), the gradient that of the token"
