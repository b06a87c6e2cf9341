"""What a row decides over the whole update before its first micro-batch, so that no split can change it (law 3).

Samples are never cut, so what looks at one sample at a time can wait for the micro-batch. What compares samples (a mean over all
weights, the tokens of largest covariance) is decided here, from the proximal logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rondel.algos.table import Algorithm
from rondel.algos.tokens import Tokens


@dataclass(frozen=True)
class Ahead:
    """One number for every trainable token of the update, in the order of its samples; None where the row leaves it to the micro-batch."""

    correction: Tensor | None = None  # [T]
    selected: Tensor | None = None  # [T] bool


NOTHING = Ahead()


def ahead(row: Algorithm, tokens: Tokens) -> Ahead:
    """`tokens` are all of the update, with the proximal logprobs as `logprobs` and a log-ratio of 0."""
    return Ahead(
        correction=row.correction(tokens.log_weight, tokens.sample, tokens.advantages),
        selected=row.surrogate.select(tokens) if hasattr(row.surrogate, "select") else None,
    )
