"""The scored samples of a step on their way to advantages, and sums and means over the members of a group. Everything
here sees the whole step, before any split.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rondel.algos.tensors import Tensor, torch


def over_group(values_N: Tensor, group_N: Tensor, how: str) -> Tensor:
    """Each entry gets the sum, mean, amin or amax of its group.  [N], [N] -> [N].  Group
    ids are names: any values, any order.
    """
    if getattr(_dense, "on", False):
        groups, index_N = len(values_N), group_N
    else:
        groups_P, index_N = group_N.unique(return_inverse=True)
        groups = len(groups_P)
    return values_N.new_zeros(groups).scatter_reduce(0, index_N, values_N, how, include_self=False)[index_N]


_dense = threading.local()


@contextmanager
def dense_group_ids() -> Iterator[None]:
    """Inside, group ids are numbers below the count of entries, so that no shape depends on how many groups there are.
    The sums are the same, in the same order.
    """
    _dense.on = True
    try:
        yield
    finally:
        _dense.on = False


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


def standardize_rewards(rewards_N: Tensor, group_N: Tensor, eps: float) -> Tensor:
    """(r_i - mean) / (std + eps) over its group.  [N], [N] -> [N]."""
    return group_deviations(rewards_N, group_N) / (group_stds(rewards_N, group_N) + eps)


def whiten_values(values_M: Tensor) -> Tensor:
    """(v - mean) / sqrt(var + 1e-8) over all of them, var unbiased.  [M] -> [M].  All 0
    where they agree, or where there is only one.
    """
    whole_M = torch.zeros_like(values_M, dtype=torch.int64)
    return group_deviations(values_M, whole_M) / (group_stds(values_M, whole_M).square() + 1e-8).sqrt()


@dataclass(frozen=True)
class ScoredSamples:
    """N samples of whole groups; T trainable tokens, in the order of the samples.

    >>> ScoredSamples(torch.tensor([1.0, 0.0]), group_N=torch.tensor([7, 7]), lengths_N=torch.tensor([3, 5]))  # doctest: +SKIP
    """

    rewards_N: Tensor
    group_N: Tensor  # int64 group ids in any order and with any values
    lengths_N: Tensor  # int64 trainable tokens
    # [N] each: what the reward was made of; NaN where a sample has no such part
    parts: dict[str, Tensor] = field(default_factory=dict)
    greedy_N: Tensor | None = None  # the reward of the greedy answer to the sample's prompt
    earned_T: Tensor | None = None  # where the reward was earned; None: all of it at the end
    values_T: Tensor | None = None  # what the critic expected before the token; these are known if the row needs them
    # what it expected behind the last token, where the episode had not ended there; None: nothing, for all
    value_after_N: Tensor | None = None
    behavior_T: Tensor | None = None
    ref_T: Tensor | None = None
    teacher_T: Tensor | None = None
    # by the place of a hint among the teachers: how far, in nats, a token that it makes likelier is from the best one;
    # -1 where it does not
    margins: dict[int, Tensor] = field(default_factory=dict)
    proximal_T: Tensor | None = None
    collision_T: Tensor | None = None  # sum of p² over the vocabulary at the token
    turn_T: Tensor | None = None  # int64: the same number along a turn, another in the next; None: a sample is one turn
    # int64: turns with the same number began in the same state, and their samples are compared; None: all of a group
    # did
    state_T: Tensor | None = None
    agents: tuple[str, ...] = ()  # N: who acted
    tasks: tuple[str, ...] = ()  # N: what was asked; the same task comes back in later steps
    unshaped_N: Tensor | None = None  # the rewards as they were given; None: nothing shaped them

    @property
    def given_N(self) -> Tensor:
        """[N] the rewards before anything shaped them."""
        return self.rewards_N if self.unshaped_N is None else self.unshaped_N

    @property
    def token_rewards(self) -> Tensor:
        """[T] what each token earned."""
        return self.at_end(self.rewards_N) if self.earned_T is None else self.earned_T

    @property
    def sample_T(self) -> Tensor:
        """Whose token it is, by its place among the samples."""
        return self.spread_to_tokens(torch.arange(len(self.lengths_N), device=self.lengths_N.device))

    @property
    def longest_turn_N(self) -> Tensor:
        """[N] tokens of its longest turn: what the limit of one reply is compared with."""
        if self.turn_T is None:
            return self.lengths_N
        turn_T = group_sizes(torch.ones_like(self.turn_T), self.turn_T)
        return torch.zeros_like(self.lengths_N).scatter_reduce(0, self.sample_T, turn_T, "amax")

    def spread_to_tokens(self, values_N: Tensor) -> Tensor:
        """Every token gets the value of its sample.  [N] -> [T]."""
        return values_N.repeat_interleave(self.lengths_N)

    def at_end(self, values_N: Tensor) -> Tensor:
        """The last token of a sample gets its value, the others 0.  [N] -> [T]."""
        written_N = self.lengths_N > 0
        out_T = values_N.new_zeros(int(self.lengths_N.sum()))
        return out_T.index_copy(0, (self.lengths_N.cumsum(0) - 1)[written_N], values_N[written_N])

    def sum_by_sample(self, values_T: Tensor) -> Tensor:
        """Added up over the tokens of each sample.  [T] -> [N]."""
        return values_T.new_zeros(len(self.lengths_N)).index_add(0, self.sample_T, values_T)
