"""Host memory for tensors whose device somebody else wants: a room for each, pinned
beside a GPU, kept from one time to the next.

A tensor is the same object before and after; only where its numbers lie changes. On a CPU
the host is the device and nothing is saved, but the copies are the same, so laws that hold here hold there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rondel.system.process_memory import storage_bytes


class HostMemory:
    """Rooms in host memory."""

    def __init__(self) -> None:
        self._rooms: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (its room, the device that it comes from)

    def put(self, tensors: Iterable[Tensor], *, changed: bool = True) -> None:
        """Off the device, bit for bit. Not `changed` since it was fetched: the room still has it."""
        leaving = [t for t in tensors if not self.holds_tensor(t)]
        for t in leaving:
            known = t in self._rooms
            if not known:
                pinned = t.device.type == "cuda"
                self._rooms[t] = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pinned), t.device
            if changed or not known:
                self._rooms[t][0].copy_(t.detach(), non_blocking=True)
        if any(t.device.type == "cuda" for t in leaving):
            torch.cuda.synchronize()
        for t in leaving:
            t.data = self._rooms[t][0]

    def fetch_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Back to where each came from."""
        for t in tensors:
            if self.holds_tensor(t):
                room, device = self._rooms[t]
                t.data = room.to(device, non_blocking=True, copy=True)

    def holds_tensor(self, tensor: Tensor) -> bool:
        return tensor in self._rooms and tensor.data_ptr() == self._rooms[tensor][0].data_ptr()

    def resident_bytes(self, tensors: Iterable[Tensor], seen: set[int]) -> int:
        """Bytes of their storages that are not in a room, each storage once; those of `seen` were counted before."""
        return storage_bytes((t for t in tensors if t.is_meta or not self.holds_tensor(t)), seen)
