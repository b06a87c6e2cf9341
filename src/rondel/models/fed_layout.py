"""An engine's step on a GPU: contexts are read by the paged kernel (models/paged_attention.py) through a table of
slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.models.cache_pools import CachePool, StepCache, upload
from rondel.models.paged_attention import LaunchBatch, TokenRun

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.dense_attention import ScoreRule


class FedLayout(StepCache):
    """One engine step on a GPU: `parts` are feeds with the rows of q that they cover, in order."""

    def __init__(self, keys: CachePool, values: CachePool, write: Tensor, parts: list[tuple[int, LaunchBatch]]) -> None:
        super().__init__(keys, values, write)
        self.parts = parts

    @property
    def is_decode(self) -> bool:
        """Whether everyone feeds one token."""
        return len(self.parts) == 1 and max(self.parts[0][1].new) == 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        keys, values = self.store_kv(layer, k, v)
        rows = q.split([rows for rows, _ in self.parts])
        out = [feeds.attend(mine, keys, values, rule) for mine, (_, feeds) in zip(rows, self.parts)]
        return out[0] if len(out) == 1 else torch.cat(out)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        pool = self.store_latents(layer, c, r)
        out, first = [], 0
        for rows, feeds in self.parts:
            own = slice(first, first + rows)
            out.append(feeds.attend_latents(q[own], pool, up.of_rows(first, rows), rule))
            first += rows
        return out[0] if len(out) == 1 else torch.cat(out)


class BlockTable:
    """The table of an engine. A step uploads the slots that are new, not the contexts:
    one for each request that decodes.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._new: list[tuple[int, int, int]] = []  # (line, column, slot)

    def record_slots(self, line: int, first: int, slots: Sequence[int]) -> None:
        self._new += [(line, first + i, slot) for i, slot in enumerate(slots)]

    def fed_layout(
        self, keys: CachePool, values: CachePool, write: Tensor, launches: Sequence[Sequence[TokenRun]]
    ) -> FedLayout:
        """`launches`: feeds in the order of their tokens, those of prompts apart from those
        of a few; each counts its rows from 0.
        """
        if self._new:
            new = torch.tensor(self._new, dtype=torch.int64).t().contiguous()
            lines, columns, slots = upload(new, self.table.device)
            self.table[lines, columns] = slots.to(torch.int32)
            self._new.clear()
        return FedLayout(
            keys,
            values,
            write,
            [(sum(f.new for f in fed), LaunchBatch.from_runs(self.table, fed)) for fed in launches if fed],
        )
