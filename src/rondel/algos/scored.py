"""The scored samples of a step on their way to advantages. Everything here sees the whole step, before any split."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Scored:
    """N samples of whole groups; T trainable tokens, in the order of the samples.

    >>> Scored(torch.tensor([1.0, 0.0]), group_N=torch.tensor([7, 7]), lengths_N=torch.tensor([3, 5]))  # doctest: +SKIP
    """

    rewards_N: Tensor
    group_N: Tensor  # int64 group ids in any order and with any values
    lengths_N: Tensor  # int64 trainable tokens
    parts: dict[str, Tensor] = field(default_factory=dict)  # [N] each: what the reward was made of; NaN where a sample has no such part
    greedy_N: Tensor | None = None  # the reward of the greedy answer to the sample's prompt

    def each(self, values_N: Tensor) -> Tensor:
        """Every token gets the value of its sample.  [N] -> [T]."""
        return values_N.repeat_interleave(self.lengths_N)
