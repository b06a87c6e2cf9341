"""Keys and values in memory that two processes of one machine map: what one writes, the other reads in place.

One memory (shared_tensors.py) for all layers of keys, one for those of values;
it takes room only where pages were written.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch

from rondel.generate.engine.builtin.shared_tensors import SharedTensors
from rondel.models.cache_pools import LayerPools
from rondel.models.paged_layout import PagedLayout, PrefillChunk

if TYPE_CHECKING:
    from rondel.models.collectives import RankGroup
    from rondel.models.loaded_model import LoadedModel

PoolShapes = dict[int, tuple[int, int]]  # of each layer: heads, size of a head
PATH = 64  # bytes of a path that another process is told


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


def share_pools(loaded: LoadedModel, pages: int, ranks: RankGroup, half: int) -> tuple[SharedPools, SharedPools]:
    """Keys and values that rank i of the first half makes and rank half + i maps. Every rank calls it."""
    shapes, partner = pool_shapes(loaded), (ranks.index + half) % ranks.size
    if ranks.index < half:
        keys, values = (SharedPools(pages, each, loaded.dtype) for each in shapes)
        words = b"".join(pools.path.encode().ljust(PATH) for pools in (keys, values))
        ranks.send(torch.tensor(list(words), dtype=torch.uint8), partner)
        return keys, values
    words = bytes(ranks.receive(torch.empty(2 * PATH, dtype=torch.uint8), partner).tolist())
    paths = (words[:PATH].decode().strip(), words[PATH:].decode().strip())
    keys, values = (SharedPools(pages, each, loaded.dtype, path) for each, path in zip(shapes, paths))
    return keys, values


@torch.inference_mode()
def pool_shapes(loaded: LoadedModel) -> tuple[PoolShapes, PoolShapes]:
    """What the layers of a model keep of a token: of keys, and of values. Ranks that share its matrices ask together."""
    where = torch.arange(1, 3, device=loaded.device)
    keys, values = LayerPools(4), LayerPools(4)
    loaded.hidden_states(where, where - 1, PagedLayout(keys, values, where, [PrefillChunk(0, 2, where)]))
    return _shapes_in(keys), _shapes_in(values)


def _shapes_in(pools: Any) -> PoolShapes:
    made: dict[int, torch.Tensor] = pools._pools
    return {layer: (pool.shape[0], pool.shape[2]) for layer, pool in made.items()}
