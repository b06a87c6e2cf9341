"""Rejection sampling of guessed tokens: which are accepted, and what is drawn in place of the first that is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


def matching_prefix_length(drawn: Sequence[int], guess: Sequence[int]) -> int:
    """How many guesses are what was drawn in their place, up to the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(drawn, guess)) if a != b), len(guess))


def accept_draft_tokens(p: Tensor, q: Tensor, guess: Tensor, coin: Tensor) -> Tensor:
    """coin < min(1, p(x) / q(x)), row by row. p, q [R, V] weights, not normalised; guess, coin [R] -> [R] bool."""
    mine, theirs = (
        w.gather(1, guess[:, None])[:, 0].double() / w.sum(-1, dtype=torch.float64) for w in (p, q)
    )  # fmt: skip
    return coin * theirs < mine


def residual_weights(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ of normalised weights, what a rejected row draws from. [R, V], [R, V] -> [R, V] double.

    Where rounding leaves nothing, p and q are the same and it is p.
    """
    p, q = (w.double() / w.sum(-1, keepdim=True, dtype=torch.float64) for w in (p, q))
    rest = (p - q).clamp_min_(0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
