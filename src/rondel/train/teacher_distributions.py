"""What teachers would have said at every token of a micro-batch, over the whole vocabulary:
kept as last hidden states, a row of D numbers a token where logits are V, and multiplied with the
teacher's head when a chunk of rows is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.linear import UnpackedLinear
    from rondel.models.vocabulary_part import VocabularyPart


@dataclass(frozen=True, slots=True)
class TeacherOpinion:
    """Of one teacher.

    hidden   [M_i, D] before its head
    at       [M_i] which of the micro-batch's M tokens, in rising order
    weight   [M_i] among the teachers of the token
    """

    head: LMHead
    hidden: Tensor
    at: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class TeacherDistribution:
    """`taught.log_q(slice(0, 64))` -> [64, V], the weighed mean of the teachers' log-probabilities at these tokens; of
    a part of the vocabulary where it is cut.
    """

    opinions: list[TeacherOpinion]
    temperature: float
    part: VocabularyPart | None = None

    def of_vocabulary(self, part: VocabularyPart, stack: UnpackedLinear) -> TeacherDistribution:
        """By products with this rank's rows of the heads alone, which nothing packs."""
        own, opinions = slice(part.first, part.first + part.size), []
        for mine in self.opinions:
            bias = None if mine.head.bias is None else mine.head.bias[own]
            head = replace(mine.head, weight=mine.head.weight[own], bias=bias, stack=stack)
            opinions.append(replace(mine, head=head))
        return replace(self, opinions=opinions, part=part)

    def of_targets(self, own: Tensor) -> TeacherDistribution:
        """Of these [m] of the micro-batch's tokens, in rising order."""
        opinions = []
        for mine in self.opinions:
            at = torch.searchsorted(own, mine.at)
            here = own.index_select(0, at.clamp_max(max(0, len(own) - 1))) == mine.at if len(own) else at < 0
            told = (x[here] for x in (mine.hidden, at, mine.weight))
            opinions.append(TeacherOpinion(mine.head, *told))
        return replace(self, opinions=opinions)

    def log_q(self, rows: slice) -> Tensor:
        told: Tensor | None = None
        for mine in self.opinions:
            first, end = torch.searchsorted(
                mine.at, torch.tensor([rows.start, rows.stop], device=mine.at.device)
            ).tolist()
            logits = mine.head.logits(mine.hidden[first:end]) / self.temperature
            opinion = logits.log_softmax(-1) if self.part is None else self.part.log_softmax(logits)
            opinion.mul_(mine.weight[first:end, None])
            if told is None:
                told = opinion.new_zeros(min(rows.stop, self.token_count) - rows.start, opinion.shape[1])
            told.index_add_(0, mine.at[first:end] - rows.start, opinion)
        assert told is not None, "a token without a teacher"
        return told

    @property
    def token_count(self) -> int:
        return max(int(mine.at[-1]) + 1 for mine in self.opinions if len(mine.at))
