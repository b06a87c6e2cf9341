"""The tokens of every sample over several ranks, where each attends to all of them (context parallel of a flow).

    rank 0   tokens 0 .. p         queries of its own run
    rank 1   tokens p .. 2p        over keys and values of all runs, gathered in each layer, and again in the backward pass

All tokens see equally much, so runs are as equal as they can be. What comes before a token's own work (noise level,
prompt) is computed on every rank, for its own tokens: gradients of weights are parts of a sum over the ranks.

M samples · P tokens of one, p of this rank · H heads of d numbers
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rondel.models.collectives import RankGroup, gather_rows, keep_rows, leave_cut
from rondel.models.shard_cut import even_runs


@dataclass(frozen=True, slots=True)
class TokenShare:
    """lengths: tokens of each rank, 3 and 2 of 5 tokens on two ranks."""

    ranks: RankGroup
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, ranks: RankGroup) -> TokenShare:
        """At least one token for each rank. ValueError where there are fewer."""
        if tokens < ranks.size:
            raise ValueError(f"{tokens} tokens of a sample over {ranks.size} ranks: each needs one")
        return cls(ranks, tuple(even_runs(tokens, ranks.size)))

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens.  [M, P, ...] -> [M, p, ...], as a view"""
        return x.narrow(1, self.first, self.lengths[self.ranks.index])

    @property
    def first(self) -> int:
        """Where this rank's tokens begin."""
        return sum(self.lengths[: self.ranks.index])

    def attend(self, q: Tensor, rows: Tensor) -> Tensor:
        """Own queries [M, H, p, d] over everybody's keys and values,
        of which `rows` [p, 2, M, H, d] are this rank's."""
        k, v = gather_rows(rows, self.lengths, self.ranks, summed=True).permute(1, 2, 3, 0, 4)
        return F.scaled_dot_product_attention(q, k, v)

    def sum(self, x: Tensor) -> Tensor:
        """Of what each rank computed from its tokens; each has the gradient of its own part."""
        return leave_cut(x, self.ranks)


@dataclass(slots=True)
class SplitTokens:
    """How the ranks of tp have tokens between the parts of a block, in runs; some may have none where these are few.

    tokens   of all ranks together, the same in every pass
    """

    ranks: RankGroup
    tokens: int = 0

    def join(self, x: Tensor, *, summed: bool) -> Tensor:
        """Own tokens [M, p, W] -> all [M, P, W]; `summed` as in collectives.gather_rows."""
        return gather_rows(x.transpose(0, 1), self._lengths, self.ranks, summed=summed).transpose(0, 1)

    def keep(self, x: Tensor, *, summed: bool) -> Tensor:
        """[M, P, W], alike on all ranks or parts of a sum (`summed`) -> own tokens [M, p, W]."""
        return keep_rows(x.transpose(0, 1), self._lengths, self.ranks, summed=summed).transpose(0, 1)

    @property
    def _lengths(self) -> list[int]:
        return even_runs(self.tokens, self.ranks.size)
