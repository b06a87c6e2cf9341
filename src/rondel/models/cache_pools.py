"""Memory of an engine's step: pools of cached keys and values, where its new tokens lie in them, and copies between
host and device for which the host does not wait.

A copy from ordinary memory makes CUDA finish all that was asked of it before, so what is uploaded lies in pinned memory
first. torch keeps such memory until the device has read it.

T new tokens · K key/value heads · D head size · B contexts of C tokens
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rondel.models.recurrent.layout import SlotStates


class CachePool(Protocol):
    """Keys or values of every layer. Heads come first, so that a gathered context is one
    matrix a head and nothing is copied again.
    """

    @property
    def data_pointers(self) -> list[int]:
        """Where the layers lie that have been written."""

    @property
    def written(self) -> list[Tensor]:
        """Those layers' pools, by layer."""

    def layer_pool(self, layer: int, like: Tensor) -> Tensor:
        """The layer's pool [K,pages,D] for tokens like [T,K,D]."""


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


class PoolSlots:
    """Slots of any shape in a pool, and the rows they are when heads and pages are one axis, made once a step."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self._rows: dict[int, Tensor] = {}

    def read(self, pool: Tensor) -> Tensor:
        """Slots [B,C] of a pool [K,pages,D] -> [K*B,C,D]."""
        return pool.flatten(0, 1).index_select(0, self._flat_slots(pool)).view(-1, self.slots.shape[-1], pool.shape[-1])

    def write(self, pool: Tensor, new: Tensor) -> None:
        """New tokens [T,K,D] into slots [T]."""
        pool.flatten(0, 1).index_copy_(0, self._flat_slots(pool), new.transpose(0, 1).flatten(0, 1))

    def _flat_slots(self, pool: Tensor) -> Tensor:
        heads, pages = pool.shape[:2]
        if heads not in self._rows:
            self._rows[heads] = (
                self.slots.flatten() + torch.arange(heads, device=pool.device)[:, None] * pages
            ).flatten()
        return self._rows[heads]


def read_kv(slots: PoolSlots, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [B,C] of both pools -> [K*B,C,D] each. Values that are the first numbers of their keys (latents) are read
    with them.
    """
    k = slots.read(keys)
    of_keys = values.is_set_to(keys[..., : values.shape[2]])  # not by addresses: a traced pass has none
    return k, k[..., : values.shape[2]] if of_keys else slots.read(values)


class StepCache:
    """The caches of one engine step. write [T]: slot of every new token."""

    def __init__(self, keys: CachePool, values: CachePool, write: Tensor) -> None:
        self.states: SlotStates | None = None  # of a model with recurrent layers
        self.keys, self.values, self.write = keys, values, write
        self._into = PoolSlots(write)

    def store_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The new tokens' keys and values into the layer's pools -> both pools."""
        keys, values = self.keys.layer_pool(layer, k), self.values.layer_pool(layer, v)
        self._into.write(keys, k)
        self._into.write(values, v)
        return keys, values

    def store_latents(self, layer: int, c: Tensor, r: Tensor) -> Tensor:
        """The new tokens' latents [T,R] and rotary keys [T,E] into the layer's pool -> the pool [1,pages,R+E]."""
        latents = torch.cat([c, r], -1)[:, None]
        pool = self.keys.layer_pool(layer, latents)
        self._into.write(pool, latents)
        return pool


# -- copies between host and device ------------------------------------------------------------------


def upload(values: Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host as a tensor of the device. A tensor keeps its shape; on a CPU it is the same one."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        made = made.pin_memory()
    return made if made.device == device else made.to(device, non_blocking=True)


class HostCopy:
    """A tensor of the device on its way to the host."""

    def __init__(self, made: Tensor) -> None:
        self._there, self._event = made, None
        if made.device.type == "cuda":
            self._there = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
            self._there.copy_(made, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The numbers. The host waits for what made them and for nothing that was asked of the device since."""
        if self._event is not None:
            self._event.synchronize()
        return self._there
