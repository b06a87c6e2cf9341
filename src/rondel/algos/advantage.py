"""From the rewards of a step to one advantage a sample, or one a token where the rule says `per_token`.

N samples · T trainable tokens · P groups. All are permutation-invariant and total: no samples, one sample or equal rewards give
numbers, never NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rondel.algos.scored import Scored
from rondel.words.errors import ConfigError


def over_group(values_N: Tensor, group_N: Tensor, how: str) -> Tensor:
    """Each sample gets the sum, mean or amin of its group.  [N], [N] -> [N]."""
    groups_P, index_N = group_N.unique(return_inverse=True)
    return values_N.new_zeros(len(groups_P)).scatter_reduce(0, index_N, values_N, how, include_self=False)[index_N]


def sizes(values_N: Tensor, group_N: Tensor) -> Tensor:
    """How many samples its group has.  [N], [N] -> [N]."""
    return over_group(torch.ones_like(values_N), group_N, "sum")


def deviations(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """d_i = r_i - mean of its group.  [N], [N] -> [N].

    The group's minimum is taken off first, so that a constant group gives exactly 0. Otherwise seven rewards of 0.1 deviate
    by a rounding error, and dividing it by a standard deviation of the same size makes an advantage of it.
    """
    height_N = rewards_N - over_group(rewards_N, group_N, "amin")
    return height_N - over_group(height_N, group_N, "mean")


@dataclass(frozen=True)
class GroupNorm:
    """A_i = (r_i - mean) / (std + eps) over its group, std unbiased.  -> [N].  arXiv:2402.03300 (GRPO).

    Zero for a constant group and for a group of 1, which has nothing to be compared with.

    eps    added to the standard deviation; matters when a group's rewards nearly agree
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or a constant group would divide 0 by 0")

    def __call__(self, scored: Scored) -> Tensor:
        deviation_N = deviations(scored.rewards_N, scored.group_N)
        freedom_N = (sizes(scored.rewards_N, scored.group_N) - 1).clamp(min=1)
        std_N = (over_group(deviation_N.square(), scored.group_N, "sum") / freedom_N).sqrt()
        return deviation_N / (std_N + self.eps)

    def __str__(self) -> str:
        return f"(R - mean of its group) / (std of its group + {self.eps:g})"


@dataclass(frozen=True)
class GroupCenter:
    """A_i = r_i - mean of its group.  -> [N].  arXiv:2503.20783 (Dr. GRPO).  Zero for a constant group or a group of 1."""

    def __call__(self, scored: Scored) -> Tensor:
        return deviations(scored.rewards_N, scored.group_N)

    def __str__(self) -> str:
        return "R - mean of its group"


@dataclass(frozen=True)
class LeaveOneOut:
    """A_i = r_i - mean of the others = n/(n-1)·(r_i - mean).  -> [N].  arXiv:2402.14740 (RLOO).

    Unbiased, since the baseline does not see r_i. Zero for a group of 1: there are no others.
    """

    def __call__(self, scored: Scored) -> Tensor:
        size_N = sizes(scored.rewards_N, scored.group_N)
        return deviations(scored.rewards_N, scored.group_N) * size_N / (size_N - 1).clamp(min=1)

    def __str__(self) -> str:
        return "R - mean of the others in its group"


@dataclass(frozen=True)
class Raw:
    """A_i = r_i.  -> [N].  Williams 1992 (REINFORCE).  No baseline: unbiased, and noisy when rewards are far from 0."""

    def __call__(self, scored: Scored) -> Tensor:
        return scored.rewards_N

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Constant:
    """A_i = value.  -> [N].  Supervised learning.  The reward is not read.

    value    the advantage of every sample
    """

    value: float = 1.0

    def __call__(self, scored: Scored) -> Tensor:
        return torch.full_like(scored.rewards_N, self.value)

    def __str__(self) -> str:
        return f"{self.value:g}"
