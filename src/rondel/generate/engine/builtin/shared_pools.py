"""Keys and values in memory that two processes of one machine map: what one writes, the other reads in place.

One memory (shared_tensors.py) for all layers of keys, one for those of values;
it takes room only where pages were written.
"""

from __future__ import annotations

import mmap

import torch

from rondel.generate.engine.builtin.shared_tensors import SharedTensors
from rondel.models.cache_pools import LayerPools

PoolShapes = dict[int, tuple[int, int]]  # of each layer: heads, size of a head


class SharedPools(LayerPools):
    """`path`: under which another process has made them."""

    def __init__(self, pages: int, shapes: PoolShapes, dtype: torch.dtype, path: str | None = None) -> None:
        super().__init__(pages)
        kind = str(dtype).removeprefix("torch.")
        each = {str(layer): ((heads, pages, width), kind) for layer, (heads, width) in sorted(shapes.items())}
        self.shared = SharedTensors(each, path)
        self.memory, pools = self.shared.map_memory()
        self._pools |= {int(layer): pool for layer, pool in pools.items()}
        self._empty = set(shapes)

    @property
    def path(self) -> str:
        return self.shared.path

    def clear(self) -> None:
        self.memory.madvise(mmap.MADV_REMOVE)
        self._empty = set(self._pools)
