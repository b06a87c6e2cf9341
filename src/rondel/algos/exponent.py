"""exp of a log-ratio, which is never infinite."""

from __future__ import annotations

from rondel.algos.tensors import Tensor

LIMIT = 20.0  # of a log-ratio: exp(20) = 5e8 is already absurd, and a hundred more would overflow


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp(clamp(x, ±20)).  [T] -> [T].  Finite for every finite x; beyond the limit no gradient passes."""
    return log_T.clamp(-LIMIT, LIMIT).exp()
