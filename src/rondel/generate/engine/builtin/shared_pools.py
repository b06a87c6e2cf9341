"""Keys and values in memory that two processes of one machine map: what one writes, the other reads in place.

One memfd for all layers of keys, one for those of values. It has no name, takes memory only where pages were written,
and is gone with the last process that maps it (law 14).
"""

from __future__ import annotations

import math
import mmap
import os

import torch

from rondel.models.cache_pools import LayerPools

PoolShapes = dict[int, tuple[int, int]]  # of each layer: heads, size of a head


class SharedPools(LayerPools):
    """`descriptor`: of the memory, or the path under which another process opens it."""

    def __init__(self, pages: int, shapes: PoolShapes, dtype: torch.dtype, descriptor: int | str | None = None) -> None:
        super().__init__(pages)
        size = sum(pages * math.prod(shape) * dtype.itemsize for shape in shapes.values())
        if isinstance(descriptor, str):
            self.fd = os.open(descriptor, os.O_RDWR | os.O_CLOEXEC)
        else:
            self.fd = os.memfd_create("rondel-cache", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, max(1, size))
        self.memory = mmap.mmap(self.fd, max(1, size))
        at = 0
        for layer, (heads, width) in sorted(shapes.items()):
            count = heads * pages * width
            pool = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at)
            self._pools[layer] = pool.view(heads, pages, width)
            at += count * dtype.itemsize
        self._empty = set(shapes)

    @property
    def path(self) -> str:
        """Under which a process of the same user opens it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def clear(self) -> None:
        self.memory.madvise(mmap.MADV_REMOVE)
        self._empty = set(self._pools)
