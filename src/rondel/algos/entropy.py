"""A reward for staying undecided."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class EntropyBonus:
    """b_t = coef·H_t, subtracted from the loss; H_t = -sum_v p_v log p_v.  [T] -> [T].  arXiv:1602.01783 (A3C).

    H comes from the pass that makes the logprobs, with its gradient.

    coef    weight of the entropy; 0 leaves it out, a negative one sharpens the policy
    """

    coef: float = 0.0

    def __call__(self, entropy_T: Tensor) -> Tensor:
        return self.coef * entropy_T

    def __str__(self) -> str:
        return "entropy of the policy at the token"
