"""Where keys and values live: one pool of pages a layer, a page holds one token.

page 0      scratch: tables are padded with it, nobody reads it
free        a stack of page numbers
cached      owned by the radix tree      private      owned by one request
law 7       free + cached + private = all pages
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


class Layers:
    """A list of per-layer pools whose tensors are made when the layer first writes: only then its head sizes are known."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._pools: dict[int, Tensor] = {}

    def at(self, layer: int, like: Tensor) -> Tensor:
        """The pool [K, pages, D] of `layer`, all pages of a head together, for tokens like [T, K, D]."""
        if layer not in self._pools:
            heads, size = like.shape[1:]
            self._pools[layer] = torch.zeros(heads, self.pages, size, dtype=like.dtype, device=like.device)
        return self._pools[layer]

    def clear(self) -> None:
        self._pools.clear()

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._pools.values())


class Pages:
    """The allocator and the memory behind it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.routes: np.ndarray | None = None  # [pages, L, K] experts that each cached token went to
        self.keys, self.values = Layers(count + 1), Layers(count + 1)
        self._free = list(range(count, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        assert n <= len(self._free), f"{n} pages wanted, {len(self._free)} free: the scheduler must make room first"
        taken = self._free[len(self._free) - n :][::-1]
        del self._free[len(self._free) - n :]
        return taken

    def give(self, pages: Iterator[int] | list[int]) -> None:
        self._free.extend(pages)

    def note_routes(self, slots: Tensor, routes: Tensor) -> None:
        """Beside its keys and values a token keeps its route, so that a prefix that is found in the cache has one too."""
        if self.routes is None:
            self.routes = np.zeros((self.count + 1, *routes.shape[1:]), np.int16)
        self.routes[slots.cpu().numpy()] = routes.cpu().numpy()

    def release_memory(self) -> None:
        """Forget every tensor; the pools come back empty at the next write."""
        self.keys.clear()
        self.values.clear()
