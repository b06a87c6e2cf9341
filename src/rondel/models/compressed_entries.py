"""Entries that windows of tokens were compressed to (models/compressed_attention.py), and where they lie among keys.

An entry stands with the last token of its window, so it is visible from there on.

T tokens · S segments of a packed call · C keys · N entries · D size of a head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CompressedEntries:
    """Beside each token [T, D] the entry of the window that ends there: where (position + 1) % rate is 0."""

    rows: Tensor
    rate: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowEnds:
    """Keys of a call at which windows end: `places` of the tokens, `used` the same with -1 for padding [S,N], and their
    positions `of` [S or 1, N], -1 for padding.
    """

    places: Tensor
    used: Tensor
    of: Tensor

    @classmethod
    def from_keys(cls, places: Tensor, used: Tensor, of: Tensor, rate: int) -> WindowEnds:
        """Of all keys [S,C] at positions of [S or 1, C]."""
        if rate == 1:
            return cls(places, used, of)
        at = of.cpu()
        is_end = (at >= 0) & ((at + 1) % rate == 0)
        columns = (~is_end).to(torch.int8).argsort(dim=1, stable=True)[:, : int(is_end.sum(1).max())]
        real, every = is_end.gather(1, columns), columns.expand(len(places), -1)
        return cls(
            places.gather(1, every),
            used.gather(1, every).masked_fill(~real, -1),
            at.gather(1, columns).masked_fill(~real, -1).to(of.device),
        )
