"""The weight of every trainable token of a sample. The loss is then a plain sum over
tokens, and no split of the batch into micro-batches, ranks or packs can change it (law 3).

`lengths_N` int64: trainable tokens of each sample of the *whole* batch, counted
before any forward pass. -> [N] float64. A sample without trainable tokens is not counted and weighs 0; nor do masks or
corrections ever enter a denominator. Samples that `mask_truncated` masks are not among `lengths_N`; what divides by
samples counts them all the same (see `masked_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.scored_samples import over_group
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


def _reciprocal_where(counted_N: Tensor, denominator: Tensor | int) -> Tensor:
    """1 / denominator where counted, else 0; no division by 0 when nothing is counted."""
    return torch.where(counted_N, 1.0 / torch.as_tensor(denominator).double().clamp(min=1), 0.0)


def masked_scale(aggregate: Component, trained_N: Tensor, lengths_N: Tensor) -> float:
    """What the weights of the trained samples are multiplied by where others are masked.  [n], [N] -> scalar.

    A masked sample's tokens are in no sum of tokens, but the sample is one of the N: n/N for a
    mean over samples, 1 for a mean over tokens, as TRL has it. So a step with many masked samples is a
    smaller step for the former and not for the latter.
    """
    samples = int((lengths_N > 0).sum())
    return int((trained_N > 0).sum()) / samples if samples and aggregate.counts_samples else 1.0


def sample_weights(aggregate: Component, lengths_N: Tensor, group_N: Tensor) -> Tensor:
    """The weight of every token of a sample; `group_N` says which samples answer one prompt.  [N], [N] -> [N]."""
    weight_N: Tensor = aggregate(lengths_N, group_N) if aggregate.counts_groups else aggregate(lengths_N)
    return weight_N


def counted_tokens(lengths_N: Tensor, counts_T: Tensor | None) -> Tensor:
    """The tokens of each sample that count in the denominators: all, or those of `TokenBatch.counts`.  [N] -> [N]."""
    if counts_T is None:
        return lengths_N
    sample_T = torch.arange(len(lengths_N)).repeat_interleave(lengths_N)
    return torch.zeros_like(lengths_N).index_add(0, sample_T, counts_T.to(lengths_N.dtype))


@dataclass(frozen=True)
class TokenMean(Component):
    """w_n = 1 / sum of lengths.  [N] -> [N].  arXiv:2503.14476 (DAPO).  Every token
    counts alike, so a long sample counts more.
    """

    def __call__(self, lengths_N: Tensor) -> Tensor:
        return _reciprocal_where(lengths_N > 0, lengths_N.sum())

    def __str__(self) -> str:
        return "1 / trainable tokens"


@dataclass(frozen=True)
class SeqMeanTokenMean(Component):
    """w_n = 1 / (N·length_n).  [N] -> [N].  arXiv:2402.03300 (GRPO).  Every sample counts
    alike, so a token of a long one counts less.
    """

    counts_samples: ClassVar[bool] = True

    def __call__(self, lengths_N: Tensor) -> Tensor:
        return _reciprocal_where(lengths_N > 0, (lengths_N > 0).sum() * lengths_N)

    def __str__(self) -> str:
        return "1 / (samples · trainable tokens of the sample)"


@dataclass(frozen=True)
class SeqMeanTokenSum(Component):
    """w_n = 1 / N.  [N] -> [N].  arXiv:2402.14740: the gradient of the mean sequence
    log-probability.  Grows with the length.
    """

    counts_samples: ClassVar[bool] = True

    def __call__(self, lengths_N: Tensor) -> Tensor:
        return _reciprocal_where(lengths_N > 0, (lengths_N > 0).sum())

    def __str__(self) -> str:
        return "1 / samples"


@dataclass(frozen=True)
class PromptMean(Component):
    """w_n = 1 / (P·tokens of its group).  [N], [N] -> [N].  arXiv:2510.13786 (ScaleRL's
    prompt average).  Every prompt counts alike, and within it every token: P prompts with any token.
    """

    counts_groups: ClassVar[bool] = True

    def __call__(self, lengths_N: Tensor, group_N: Tensor | None = None) -> Tensor:
        """Without `group_N` every sample answers a prompt of its own."""
        group_N = torch.arange(len(lengths_N), device=lengths_N.device) if group_N is None else group_N
        groups = len(group_N[lengths_N > 0].unique())
        return _reciprocal_where(lengths_N > 0, groups * over_group(lengths_N, group_N, "sum"))

    def __str__(self) -> str:
        return "1 / (prompts · trainable tokens of all answers to the prompt)"


@dataclass(frozen=True)
class FixedNorm(Component):
    """w_n = 1 / (N·length).  [N] -> [N].  arXiv:2503.20783 (Dr. GRPO).  A constant in
    place of the length: no length bias.

    length    the constant; unset, it becomes the recipe's max_tokens, that of one reply, however many turns there are
    """

    length: int | None = None
    counts_samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.length is not None and not self.length >= 1:
            raise ConfigError(f"length = {self.length}; it must be at least 1 token")

    def bounded(self, max_tokens: int) -> FixedNorm:
        return self if self.length is not None else replace(self, length=max_tokens)

    def __call__(self, lengths_N: Tensor) -> Tensor:
        if self.length is None:
            raise ConfigError("algo.aggregate.length is not set: set it, or call row.bounded(max_tokens) first")
        return _reciprocal_where(lengths_N > 0, (lengths_N > 0).sum() * self.length)

    def __str__(self) -> str:
        return f"1 / (samples · {'max_tokens' if self.length is None else self.length})"
