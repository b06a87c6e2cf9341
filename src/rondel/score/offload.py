"""A frozen model that is on its device only while it may be: its weights in host memory
are the originals, the device has a copy.
"""

from __future__ import annotations

from typing import Any


class OffloadedModel:
    """`naps.wake()`, `naps.sleep()`: each parameter and buffer is the same tensor object
    before and after, with the same bits.

    On a CPU the host is the device: the copies and the count of bytes are the same, so what holds here holds there.
    """

    def __init__(self, model: Any, device: Any) -> None:
        import torch

        self.torch, self.device, self.asleep = torch, torch.device(device), True
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        pinned = self.device.type == "cuda"
        self.rooms = [(t, t.data.pin_memory() if pinned else t.data) for t in tensors]
        for t, room in self.rooms:
            t.data = room

    def wake(self) -> None:
        for t, room in self.rooms:
            t.data = room.to(self.device, non_blocking=True, copy=True)
        self.asleep = False

    def sleep(self) -> None:
        """The memory goes back to the device, which another process wants."""
        for t, room in self.rooms:
            t.data = room
        self.asleep = True
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)
            self.torch.cuda.empty_cache()

    @property
    def device_bytes(self) -> int:
        """On the device, each storage once."""
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t, room in self.rooms
            if t.data_ptr() != room.data_ptr()
        }
        return sum(held.values())
