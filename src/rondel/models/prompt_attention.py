"""Attention of an engine's prompts by the loops of training,
so that both sides attend to a prompt with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.models import cpu_kernels
from rondel.models.cache_pools import PoolSlots
from rondel.models.tree_loops import TreeTable

if TYPE_CHECKING:
    from rondel.models.dense_attention import ScoreRule
    from rondel.models.paged_layout import PagedLayout


class PromptAttention:
    """All prompts of a step (models/tree_loops.py), each behind what the cache has of it: the loops read the keys of
    the step's own tokens first, then those above.
    """

    def __init__(self, layout: PagedLayout) -> None:
        rows, above, at = list[tuple[int, int, int, int]](), list[Tensor](), 0
        for chunk in layout.chunks:
            depth = len(chunk.context) - chunk.length
            rows.append((chunk.start, chunk.length, depth, at))
            above.append(chunk.context[:depth])
            at += depth
        first = len(layout.write)
        self._slots = PoolSlots(torch.cat([layout.write, *above])[None])
        self._table = TreeTable(rows, torch.arange(first, first + at), [[i] for i in range(len(rows))])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule, out: Tensor) -> None:
        """q [rows, H, D], pools [K, pages, D] -> the prompts' rows of out [rows, H, D]."""
        k, v = (self._slots.read(pool).transpose(0, 1).contiguous() for pool in (keys, values))
        log_sums = torch.empty(q.shape[:2], dtype=torch.float32)
        self._table.run(cpu_kernels.library(), q, k, rule, v, out, log_sums, backward=False)
