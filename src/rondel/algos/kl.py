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

from rondel.algos.ratio import LIMIT, bounded_exp
from rondel.words.errors import ConfigError
from rondel.words.registry import one_of


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
    """kl_t = k(log pi - log pi_ref), weighed by coef in the loss.  [T], [T], [T] -> [T].  arXiv:2402.03300.  Tokens drawn on-policy.

    `through` keeps the value of k1 or k3 and takes the gradient of k2, that of KL(policy || reference). `unbiased` multiplies by
    pi / pi_behavior, through which the gradient passes too (arXiv:2512.02556): value and gradient are then right for k1 and k3,
    whoever drew the tokens.

    kind        the estimator: k1, k2 or k3
    coef        its weight in the loss; 0 leaves the reference out
    through     own, or k2: where the gradient comes from
    unbiased    weigh by policy / behavior
    """

    kind: str = "k3"
    coef: float = 0.0
    through: str = "own"
    unbiased: bool = False

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ESTIMATORS)
        one_of("through", self.through, ("own", "k2"))
        if not self.coef >= 0:
            raise ConfigError(f"coef = {self.coef}; it must not be negative: that would drive the policy away from the reference")
        if self.unbiased and self.through == "k2":
            raise ConfigError("through = 'k2' with unbiased = true; each gives the gradient of the KL, both give it twice. Remove one")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs"} | ({"behavior_logprobs"} if self.unbiased else set())) if self.coef else frozenset()

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        if not self.coef:
            return dict.fromkeys(("kind", "through", "unbiased"), "kl.coef is 0")
        return {"through": "k2 has that gradient already"} if self.kind == "k2" else {}

    @property
    def slope(self) -> str:
        own = "x" if self.through == "k2" else SLOPES[self.kind]
        return f"{FORMULAS[self.kind]} + {own}" if self.unbiased else own

    def __call__(self, logprobs_T: Tensor, ref_T: Tensor, log_drift_T: Tensor) -> Tensor:
        """`log_drift_T` = log pi - log pi_behavior, read where `unbiased`."""
        kl_T = ESTIMATORS[self.kind](logprobs_T - ref_T)
        if self.through == "k2" and self.kind != "k2":
            slope_T = k2(logprobs_T - ref_T)
            kl_T = kl_T.detach() + slope_T - slope_T.detach()
        return bounded_exp(log_drift_T) * kl_T if self.unbiased else kl_T

    def __str__(self) -> str:
        text = f"{FORMULAS[self.kind]} with x = logp - logp_ref"
        if self.through == "k2" and self.kind != "k2":
            text += ", the gradient that of x²/2"
        return f"policy / behavior · ({text})" if self.unbiased else text
