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

    In the reward it is a cost that the token pays, r_t - coef·k(log pi_behavior - log pi_ref), without a gradient of its own; a token is
    charged in one of the two places, never in both. With a target the coefficient follows the KL of the samples (see `steered`).

    kind       the estimator: k1, k2 or k3
    coef       its weight; 0 leaves the reference out
    where      "loss" or "reward"
    target     nats of a whole sample that the coefficient steers to, starting from coef; None keeps it
    horizon    over how many samples it may change by a fifth
    """

    kind: str = "k3"
    coef: float = 0.0
    where: str = "loss"
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if self.kind not in ESTIMATORS:
            raise ConfigError(
                f"kind = {self.kind!r}; it must be one of {', '.join(ESTIMATORS)}.{nearest(str(self.kind), list(ESTIMATORS))}"
            )
        if self.where not in ("loss", "reward"):
            raise ConfigError(f"where = {self.where!r}; it must be 'loss' or 'reward'.{nearest(str(self.where), ['loss', 'reward'])}")
        if self.target is not None and not self.target > 0:
            raise ConfigError(f"target = {self.target}; it must be positive: a policy that learns moves away from its reference")
        if not self.horizon >= 1:
            raise ConfigError(f"horizon = {self.horizon}; it must be at least 1 sample")
        if not self.coef >= 0:
            raise ConfigError(f"coef = {self.coef}; it must not be negative: that would drive the policy away from the reference")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs", *(("behavior_logprobs",) if self.charged else ())}) if self.coef else frozenset()

    @property
    def charged(self) -> bool:
        """The tokens pay it out of their rewards."""
        return self.coef > 0 and self.where == "reward"

    @property
    def pulls(self) -> bool:
        """The loss has it."""
        return self.coef > 0 and self.where == "loss"

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        if not self.coef:
            return dict.fromkeys(("kind", "where", "target", "horizon"), "kl.coef is 0")
        return {} if self.target is not None else {"horizon": "kl.target is not set"}

    @property
    def steers(self) -> bool:
        return self.coef > 0 and self.target is not None

    def steered(self, measured: float, samples: int) -> float:
        """coef·(1 + clip(measured/target - 1, ±0.2)·samples/horizon): what comes after a step of so many samples.  arXiv:1909.08593.

        `measured` is the mean over samples of sum_t log pi_behavior - log pi_ref.
        """
        if self.target is None:
            return self.coef
        return self.coef * (1 + min(max(measured / self.target - 1, -0.2), 0.2) * samples / self.horizon)

    @property
    def slope(self) -> str:
        return SLOPES[self.kind]

    def __call__(self, logprobs_T: Tensor, ref_T: Tensor) -> Tensor:
        return ESTIMATORS[self.kind](logprobs_T - ref_T)

    def __str__(self) -> str:
        return f"{FORMULAS[self.kind]} with x = logp - logp_ref"
