"""Where the inputs of layers wait for the backward pass: host memory beside a GPU, or a file (torch calls the way there
`saved_tensors_hooks`; the schedule is that of arXiv:2104.07857).

    forward    layer 0 | layer 1 | layer 2 ...       an input is copied out while its layer runs
    backward   ... layer 2 | layer 1 | layer 0       the input of the layer below is fetched while one runs again

Copies are exact, so no bit of a gradient depends on the store.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.system.files import guard_write, make_folder


class StoredActivation:
    """One tensor that is elsewhere: what it was, and where a store has it."""

    def __init__(self, like: Tensor, place: Tensor | int, below: StoredActivation | None = None) -> None:
        self.shape, self.dtype, self.device, self.place = like.shape, like.dtype, like.device, place
        self.below = None if below is None else weakref.ref(below)  # stored before it, so wanted after it
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None


class ActivationStore(Protocol):
    def pack(self, tensor: Tensor) -> StoredActivation | Tensor:
        """Called with each tensor that a layer keeps; small integers stay."""

    def unpack(self, kept: StoredActivation | Tensor) -> Tensor:
        """The same bits, on the device that they came from."""


class HostActivations:
    """In host memory, pinned beside a GPU; copies run on a stream of their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[StoredActivation] | None = None

    def pack(self, tensor: Tensor) -> StoredActivation | Tensor:
        if not tensor.is_floating_point():
            return tensor
        on_gpu = tensor.device.type == "cuda"
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        if on_gpu:
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))  # until it is computed
            tensor.record_stream(self._stream)  # its memory is not given away before it is copied
        with self._beside():
            room.copy_(tensor.detach(), non_blocking=True)
        kept = StoredActivation(tensor, room, None if self._last is None else self._last())
        self._last = weakref.ref(kept)
        return kept

    def unpack(self, kept: StoredActivation | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        assert kept.fetched is not None
        (tensor, ready), kept.fetched = kept.fetched, None
        if ready is not None:
            torch.cuda.current_stream(kept.device).wait_event(ready)
            tensor.record_stream(torch.cuda.current_stream(kept.device))
        if kept.below is not None and (below := kept.below()) is not None:
            self._fetch(below)
        return tensor

    def _fetch(self, kept: StoredActivation) -> None:
        if kept.fetched is None:
            assert isinstance(kept.place, Tensor)
            with self._beside():
                tensor = kept.place.to(kept.device, non_blocking=True, copy=True)
                ready = None if self._stream is None else self._stream.record_event()
            kept.fetched = tensor, ready

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class DiskActivations:
    """In a file without a name, so that nothing is left of it after any exit. Each lies in the first gap between those
    that are still wanted: a pipeline (train/pipeline_schedule.py) begins micro-batches before earlier ones are used up.

    size  where the last of them ends
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.size = make_folder(Path(folder)), 0
        with guard_write(self.folder, error=ModelError):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as the store
        self._held: weakref.WeakSet[StoredActivation] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> StoredActivation | Tensor:
        if not tensor.is_floating_point():
            return tensor
        data = _bytes_of(tensor.detach().cpu().contiguous())
        at, end = self._first_gap(len(data))
        kept, self.size = StoredActivation(tensor, at), max(end, at + len(data))
        with guard_write(self.folder, len(data), ModelError, "writing activations to"):
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                at, data = at + written, data[written:]
        self._held.add(kept)
        return kept

    def _first_gap(self, size: int) -> tuple[int, int]:
        """Where so many bytes have room, and where the last of those that are wanted ends."""
        gap, end = None, 0
        for place, taken in sorted((kept.place, kept.shape.numel() * kept.dtype.itemsize) for kept in self._held):
            assert isinstance(place, int)
            gap = end if gap is None and place - end >= size else gap
            end = max(end, place + taken)
        return (end if gap is None else gap), end

    def unpack(self, kept: StoredActivation | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        tensor, at = torch.empty(kept.shape, dtype=kept.dtype), kept.place
        assert isinstance(at, int)
        data = _bytes_of(tensor)
        while data:
            if not (read := os.preadv(self._file.fileno(), [data], at)):
                raise ModelError(f"activations in {self.folder} end at byte {at}: the file was cut from outside")
            at, data = at + read, data[read:]
        return tensor.to(kept.device)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def activation_store(kind: str, folder: str) -> ActivationStore | None:
    """What `trainer.memory.activations` names; None where they stay on the device. `folder` is for the file."""
    if kind == "disk":
        return DiskActivations(folder or tempfile.gettempdir())
    return HostActivations() if kind == "host" else None
