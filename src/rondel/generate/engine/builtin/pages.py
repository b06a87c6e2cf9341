"""Where keys and values live: one pool of pages a layer, a page holds one token.

page 0      scratch: tables are padded with it, nobody reads it
free        a stack of page numbers
cached      owned by the radix tree      private      owned by one request
law 7       free + cached + private = all pages
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor


class LayerPools:
    """A list of per-layer pools whose tensors are made when the layer first writes: only then its head sizes are known.

    On Linux a pool on the CPU is a mapping of its own: pages that nobody wrote cost
    nothing, and `clear` gives the memory back while every tensor stays where it is, so that nothing which
    holds its address notices. Elsewhere it is made anew.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._pools: dict[int, Tensor] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._empty: set[int] = set()  # layers whose memory was given back and that have not written since

    def layer_pool(self, layer: int, like: Tensor) -> Tensor:
        """The pool [K, pages, D] of `layer`, all pages of a head together, for tokens like [T, K, D]."""
        if layer not in self._pools:
            shape = (like.shape[1], self.pages, like.shape[2])
            if like.device.type == "cpu" and sys.platform == "linux":
                self._mapped[layer] = map_zeros(math.prod(shape) * like.element_size())
                self._pools[layer] = torch.frombuffer(self._mapped[layer], dtype=like.dtype).view(shape)
            else:
                self._pools[layer] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._empty.discard(layer)
        return self._pools[layer]

    def clear(self) -> None:
        """Forget what is written and give the memory back."""
        for layer in list(self._pools):
            if layer in self._mapped:
                self._mapped[layer].madvise(mmap.MADV_DONTNEED)
                self._empty.add(layer)
            else:
                del self._pools[layer]

    @property
    def data_pointers(self) -> list[int]:
        return [t.data_ptr() for t in self._pools.values()]

    @property
    def written(self) -> list[Tensor]:
        """By layer, those that a layer has written."""
        return [self._pools[layer] for layer in sorted(self._pools)]

    @property
    def pool_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer, t in self._pools.items() if layer not in self._empty)


def map_zeros(size: int) -> mmap.mmap:
    """Zeros that take memory only where they are written, in large pages where the kernel has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class PageAllocator:
    """The allocator and the memory behind it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.routes: np.ndarray | None = None  # [pages, L, K] experts that each cached token went to, and keys it chose
        self.keys, self.values = LayerPools(count + 1), LayerPools(count + 1)
        self._free = list(range(count, 0, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate_pages(self, n: int) -> list[int]:
        assert n <= len(self._free), f"{n} pages wanted, {len(self._free)} free: the scheduler must make room first"
        taken = self._free[len(self._free) - n :][::-1]
        del self._free[len(self._free) - n :]
        return taken

    def free_pages(self, pages: Iterator[int] | list[int]) -> None:
        self._free.extend(pages)

    def note_routes(self, slots: Tensor, routes: Tensor) -> None:
        """Beside its keys and values a token keeps its route, so that a prefix that is found in
        the cache has one too.
        """
        if self.routes is None:
            self.routes = np.zeros((self.count + 1, *routes.shape[1:]), np.uint16)
        self.routes[slots.cpu().numpy()] = routes.cpu().numpy()

    def release_memory(self) -> None:
        """Forget every key and value; the pools are empty at the next write."""
        self.keys.clear()
        self.values.clear()
