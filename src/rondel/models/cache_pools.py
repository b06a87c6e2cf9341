"""Pools of cached keys and values, and where the new tokens of an engine's step lie in them.

T new tokens · K key/value heads · D head size · B contexts of C tokens
"""

from __future__ import annotations

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
