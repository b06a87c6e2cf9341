"""Recurrent states: one slot for each running sequence, and snapshots that the prefix cache finds.

    slot   0 ............ rows - 1 | rows ............ rows + count - 1
           of running sequences,   | snapshots, each owned by a node of the radix tree and true at its end:
           by their row            | half for ends of prompts (siblings), half for ends of answers (next turns)

Keys and values can be cut anywhere, a state cannot: a prompt is found in the cache up to the last snapshot on its way.
The event loop decides, and the device thread copies at the start of the next step, in the order of the decisions.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rondel.core.errors import LawError
from rondel.models.cache_pools import map_zeros
from rondel.planner.resolve import state_slots

if TYPE_CHECKING:
    from rondel.models.recurrent.layout import StateRule


class SnapshotOwner(Protocol):
    """A node of the radix tree: the slot of the snapshot at its end, if one is kept."""

    state: int | None


class StateMemory:
    """Pools [slots, ...] of each layer's states, made when a layer first asks."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._pools: dict[tuple[int, str], Tensor] = {}

    def state_pool(self, layer: int, rule: StateRule, device: torch.device) -> Tensor:
        if (layer, rule.name) not in self._pools:
            shape = (self.slots, *rule.state_shape)
            size = math.prod(shape) * rule.state_dtype.itemsize
            if device.type == "cpu" and sys.platform == "linux" and size:
                pool = torch.frombuffer(map_zeros(size), dtype=rule.state_dtype).view(shape)
            else:
                pool = torch.zeros(shape, dtype=rule.state_dtype, device=device)
            self._pools[layer, rule.name] = pool
        return self._pools[layer, rule.name]

    @property
    def pools(self) -> Mapping[tuple[int, str], Tensor]:
        """By layer and name of its rule, those that a layer has asked for."""
        return self._pools

    def copy_slot(self, source: int, target: int) -> None:
        for pool in self._pools.values():
            pool[target].copy_(pool[source])

    def clear(self) -> None:
        """Give the memory back."""
        self._pools.clear()

    @property
    def pool_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())


class SequenceStates:
    """Which slot is whose, and which copies are still to be made."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.count = state_slots(rows) - rows
        each = self.count // 2
        self.memory = StateMemory(rows + self.count)
        self._owners: dict[bool, OrderedDict[int, SnapshotOwner]] = {True: OrderedDict(), False: OrderedDict()}
        self._free = {
            is_prompt: list(range(rows + at, rows + at + each)) for is_prompt, at in ((True, 0), (False, each))
        }
        self._copies: list[tuple[int, int]] = []

    def another(self) -> SequenceStates:
        """For as many sequences of another rank."""
        return SequenceStates(self.rows)

    @property
    def held(self) -> int:
        """Snapshots that exist."""
        return sum(len(owners) for owners in self._owners.values())

    def save(self, row: int, node: SnapshotOwner, *, is_prompt: bool) -> None:
        """Keep the state of a running sequence at the end of `node`,
        in place of the snapshot that was unused longest."""
        if node.state is not None:
            return self._touch(node.state)
        if not self._free[is_prompt]:
            self.forget(next(iter(self._owners[is_prompt].values())))
        node.state = self._free[is_prompt].pop()
        self._owners[is_prompt][node.state] = node
        self._copies.append((row, node.state))

    def restore(self, node: SnapshotOwner, row: int) -> None:
        """A sequence goes on from the end of `node`."""
        assert node.state is not None, "a prefix was matched where no state is kept"
        self._touch(node.state)
        self._copies.append((node.state, row))

    def forget(self, node: SnapshotOwner) -> None:
        """The node loses its snapshot, or is gone with it."""
        for is_prompt, owners in self._owners.items():
            if node.state is not None and owners.pop(node.state, None) is not None:
                self._free[is_prompt].append(node.state)
        node.state = None

    def _touch(self, slot: int) -> None:
        for owners in self._owners.values():
            if slot in owners:
                owners.move_to_end(slot)

    def make_copies(self) -> None:
        """On the device's thread, before a pass."""
        for source, target in self._copies:
            self.memory.copy_slot(source, target)
        self._copies.clear()

    def drop_copies(self) -> None:
        """Everything that they were for is gone."""
        self._copies.clear()

    def check_slots(self) -> None:
        """Free + held = all snapshots, and every owner knows its slot."""
        free = sum(len(slots) for slots in self._free.values())
        owned = [slot for owners in self._owners.values() for slot, node in owners.items() if node.state == slot]
        if free + len(owned) != self.count or self.held != len(owned):
            raise LawError(f"state snapshots do not add up: {free} free + {len(owned)} owned != {self.count}")
