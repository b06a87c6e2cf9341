"""Tensors in memory that two processes of one machine map: one makes it and tells its path, the other opens it.

It is a memfd: it has no name, and is gone with the last process that maps it (law 14).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rondel.models.names import TensorShape

ALIGNED = 64  # bytes: where each tensor begins


class SharedTensors:
    """`shapes`: (shape, dtype) by name; `path`: of memory that another process made for the same shapes."""

    def __init__(self, shapes: Mapping[str, TensorShape], path: str | None = None) -> None:
        self.places: dict[str, tuple[int, TensorShape]] = {}
        size = 0
        for name, (shape, dtype) in shapes.items():
            self.places[name] = size, (shape, dtype)
            size += -(-prod(shape) * getattr(torch, dtype).itemsize // ALIGNED) * ALIGNED
        self.size = max(1, size)
        if path is None:
            self.fd = os.memfd_create("rondel-tensors", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.size)
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """Under which a process of the same user opens it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def map_memory(self) -> tuple[mmap.mmap, dict[str, Tensor]]:
        """The memory, and the tensors in place: what is written to them, the other process reads.
        They keep the memory."""
        memory = mmap.mmap(self.fd, self.size)
        return memory, self._views(memory)

    def read_tensors(self) -> dict[str, Tensor]:
        """A copy of them, in memory of this process."""
        with mmap.mmap(self.fd, self.size) as memory:
            return self._views(bytearray(memory))

    def _views(self, memory: mmap.mmap | bytearray) -> dict[str, Tensor]:
        found = {}
        for name, (at, (shape, dtype)) in self.places.items():
            kind, count = getattr(torch, dtype), prod(shape)
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=at) if count else torch.empty(0, dtype=kind)
            found[name] = flat.view(shape)
        return found

    def close(self) -> None:
        """Nobody opens it any more."""
        os.close(self.fd)
