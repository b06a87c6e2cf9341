"""Keys, values and recurrent states in memory that two processes of one machine map: what one writes, the other reads in
place.

One memory (shared_tensors.py) for all layers of keys, one for those of values, one for the states;
it takes room only where something was written.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rondel.generate.engine.builtin.shared_tensors import SharedTensors
from rondel.generate.engine.builtin.states import StateMemory
from rondel.models.cache_pools import LayerPools
from rondel.models.paged_layout import PagedLayout, PrefillChunk
from rondel.models.recurrent.layout import SlotStates

if TYPE_CHECKING:
    from rondel.models.collectives import RankGroup
    from rondel.models.loaded_model import LoadedModel

PoolShapes = dict[int, tuple[int, int]]  # of each layer: heads, size of a head
StateShapes = dict[tuple[int, str], tuple[tuple[int, ...], torch.dtype]]
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

    def clear(self) -> None:
        self.memory.madvise(mmap.MADV_REMOVE)
        self._empty = set(self._pools)


class SharedStates(StateMemory):
    """`shapes` and dtypes of one slot, by layer and name of its rule; `path`: under which another process has made them;
    `copies`: where copies of slots are noted for ranks that have other parts of the same states.
    """

    def __init__(
        self, slots: int, shapes: StateShapes, path: str | None = None, copies: list[tuple[int, int]] | None = None
    ) -> None:
        super().__init__(slots)
        self.copies, self._where = copies, {f"{layer} {name}": (layer, name) for layer, name in sorted(shapes)}
        each = {}
        for told, where in self._where.items():
            shape, dtype = shapes[where]
            each[told] = ((slots, *shape), str(dtype).removeprefix("torch."))
        self.shared = SharedTensors(each, path)
        self.memory, pools = self.shared.map_memory()
        self._pools |= {self._where[told]: pool for told, pool in pools.items()}

    def copy_slot(self, source: int, target: int) -> None:
        super().copy_slot(source, target)
        if self.copies is not None:
            self.copies.append((source, target))

    def clear(self) -> None:
        self.memory.madvise(mmap.MADV_REMOVE)
        if self.copies is not None:
            self.copies.clear()


class SharedCache(NamedTuple):
    """What a rank of each half has of the cache, the same memory in both."""

    keys: SharedPools
    values: SharedPools
    states: SharedStates | None


def share_cache(
    loaded: LoadedModel,
    pages: int,
    slots: int,
    ranks: RankGroup,
    half: int,
    copies: list[tuple[int, int]] | None = None,
) -> SharedCache:
    """What rank i of the first half makes and rank half + i maps. Every rank calls it. `slots`: of recurrent states;
    `copies`: of `SharedStates`.
    """
    keys, values, states = cache_shapes(loaded, slots)
    partner = (ranks.index + half) % ranks.size

    def make_cache(paths: Sequence[str | None]) -> SharedCache:
        return SharedCache(
            SharedPools(pages, keys, loaded.dtype, paths[0]),
            SharedPools(pages, values, loaded.dtype, paths[1]),
            SharedStates(slots, states, paths[2], copies) if slots else None,
        )

    if ranks.index < half:
        made = make_cache([None] * 3)
        words = b"".join(part.shared.path.encode().ljust(PATH) for part in made if part is not None)
        ranks.send(torch.tensor(list(words), dtype=torch.uint8), partner)
        return made
    words = bytes(ranks.receive(torch.empty((3 if slots else 2) * PATH, dtype=torch.uint8), partner).tolist())
    return make_cache([words[at : at + PATH].decode().strip() for at in range(0, len(words), PATH)])


def copy_slots(
    states: StateMemory, copies: Sequence[tuple[int, int]], ranks: RankGroup, half: int, *, read: bool
) -> None:
    """Copies of states that a step begins with, by each rank of the first half but the leader, which has made its own. Of
    the other half each waits for its partner, and makes none: a slot may be source of one copy and target of the next.

    read  whether the other half has a part in the step
    """
    if not copies:
        return
    word = torch.zeros(1, dtype=torch.int64)
    if ranks.index < half:
        for source, target in copies:
            states.copy_slot(source, target)
        if read:
            ranks.send(word, ranks.index + half)
    elif read and ranks.index > half:
        ranks.receive(word, ranks.index - half)


@torch.inference_mode()
def cache_shapes(loaded: LoadedModel, slots: int) -> tuple[PoolShapes, PoolShapes, StateShapes]:
    """What the layers of a model keep: of a token as keys and as values, and of a sequence as states, if there are
    `slots` for these. Ranks that share its matrices ask together.
    """
    where = torch.arange(1, 3, device=loaded.device)
    keys, values, states = LayerPools(4), LayerPools(4), StateMemory(1)
    layout = PagedLayout(keys, values, where, [PrefillChunk(0, 2, where)])
    if slots:
        layout.states = SlotStates(states, [(0, 2, 0, True)], loaded.device)
    loaded.hidden_states(where, where - 1, layout)
    of_states = {which: (tuple(pool.shape[1:]), pool.dtype) for which, pool in states.pools.items()}
    return _shapes_in(keys), _shapes_in(values), of_states


def _shapes_in(pools: Any) -> PoolShapes:
    made: dict[int, torch.Tensor] = pools._pools
    return {layer: (pool.shape[0], pool.shape[2]) for layer, pool in made.items()}
