"""Estimators of KL(policy || reference) from the drawn token alone: x = log pi - log pi_ref, x ~ policy.

         mean on-policy       mean gradient on-policy
    k1   KL                   0: in a loss it is noise
    k2   KL only for small x  that of KL(policy || reference)
    k3   KL, never negative   that of KL(reference || policy)

So the best number and the best gradient come from different estimators (arXiv:2506.09477).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rondel.algos.ratio import LIMIT
from rondel.words.errors import ConfigError
from rondel.words.registry import nearest


def k1(x_T: Tensor) -> Tensor:
    """x.  [T] -> [T].  Schulman 2020.  Unbiased, of either sign."""
    return x_T


def k2(x_T: Tensor) -> Tensor:
    """x²/2.  [T] -> [T].  Schulman 2020.  Half the second moment: biased unless x is small."""
    return x_T.square() / 2


def k3(x_T: Tensor) -> Tensor:
    """exp(-x) - 1 + x.  [T] -> [T].  Schulman 2020.  Unbiased where the policy covers the reference; x is clamped to ±20."""
    x_T = x_T.clamp(-LIMIT, LIMIT)
    return torch.expm1(-x_T) + x_T


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
SLOPES = {"k1": "1", "k2": "x", "k3": "1 - exp(-x)"}
FORMULAS = {"k1": "x", "k2": "x²/2", "k3": "exp(-x) - 1 + x"}


@dataclass(frozen=True)
class Kl:
    """kl_t = k(log pi - log pi_ref), weighed by coef in the loss.  [T], [T] -> [T].  arXiv:2402.03300.  Tokens drawn on-policy.

    kind    the estimator: k1, k2 or k3
    coef    its weight in the loss; 0 leaves the reference out
    """

    kind: str = "k3"
    coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ESTIMATORS:
            raise ConfigError(
                f"kind = {self.kind!r}; it must be one of {', '.join(ESTIMATORS)}.{nearest(str(self.kind), list(ESTIMATORS))}"
            )
        if not self.coef >= 0:
            raise ConfigError(f"coef = {self.coef}; it must not be negative: that would drive the policy away from the reference")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs"}) if self.coef else frozenset()

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.coef else {"kind": "kl.coef is 0"}

    @property
    def slope(self) -> str:
        return SLOPES[self.kind]

    def __call__(self, logprobs_T: Tensor, ref_T: Tensor) -> Tensor:
        return ESTIMATORS[self.kind](logprobs_T - ref_T)

    def __str__(self) -> str:
        return f"{FORMULAS[self.kind]} with x = logp - logp_ref"
