"""How far the policy has moved from the proximal anchor since the batch was drawn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LIMIT = 20.0  # of a log-ratio: exp(20) = 5e8 is already absurd, and a hundred more would overflow


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp(clamp(x, ±20)).  [T] -> [T].  Finite for every finite x; beyond the limit no gradient passes."""
    return log_T.clamp(-LIMIT, LIMIT).exp()


@dataclass(frozen=True)
class TokenRatio:
    """log r_t = log pi(t) - log pi_proximal(t).  [T], [T] -> [T].  arXiv:1707.06347.  Each token stands for itself."""

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return log_ratio_T

    def __str__(self) -> str:
        return "exp(logp - logp_proximal) of the token"
