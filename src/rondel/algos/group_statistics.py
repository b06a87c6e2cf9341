"""Sums and means over the members of a group, or over the tokens of a sample."""

from __future__ import annotations

from rondel.algos.tensors import Tensor, torch


def over_group(values_N: Tensor, group_N: Tensor, how: str) -> Tensor:
    """Each entry gets the sum, mean, amin or amax of its group.  [N], [N] -> [N].  Group
    ids are names: any values, any order.
    """
    groups_P, index_N = group_N.unique(return_inverse=True)
    return values_N.new_zeros(len(groups_P)).scatter_reduce(0, index_N, values_N, how, include_self=False)[index_N]


def group_sizes(values_N: Tensor, group_N: Tensor) -> Tensor:
    """How many entries its group has.  [N], [N] -> [N]."""
    return over_group(torch.ones_like(values_N), group_N, "sum")


def group_deviations(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """d_i = r_i - mean of its group.  [N], [N] -> [N].

    The group's minimum is taken off first, so that a constant group gives exactly 0.
    Otherwise seven rewards of 0.1 deviate by a rounding error, and dividing it by a standard
    deviation of the same size makes an advantage of it.
    """
    height_N = rewards_N - over_group(rewards_N, group_N, "amin")
    return height_N - over_group(height_N, group_N, "mean")


def group_stds(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """The unbiased standard deviation of its group; 0 for a group of 1.  [N], [N] -> [N]."""
    freedom_N = (group_sizes(rewards_N, group_N) - 1).clamp(min=1)
    return (over_group(group_deviations(rewards_N, group_N).square(), group_N, "sum") / freedom_N).sqrt()
