"""Frozen weights in a mapped file: they are read from there when a pass wants them,
and are not resident between passes.

    file       | embedding | layer 0 | layer 1 | ...     each tensor begins at a page; the file has no name
    resident     a layer while it computes, the embedding and head until the pass ends

What was read stays in the kernel's cache of files as long as nothing else needs that memory.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rondel.core.errors import ModelError
from rondel.system.files import guard_write, make_folder

Range = tuple[int, int]  # (first byte, bytes) of a tensor in the file


class MappedWeights:
    """The parameters `chosen` of a frozen model, moved into a file in `folder`; each keeps its object, shape and bits.

    Raises ModelError where the file cannot be written.
    """

    def __init__(self, model: nn.Module, chosen: Iterable[nn.Parameter], folder: Path | str) -> None:
        held = [p for p in chosen if p.is_cpu and not p.requires_grad and p.numel()]
        self._ranges: dict[int, Range] = {}
        self.size, self.addresses = 0, set[int]()  # bytes of the file; of the storages that lie in it
        for p in held:
            self._ranges[id(p)] = self.size, p.nbytes
            self.size += -(-p.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if not held:
            return
        folder = make_folder(Path(folder))
        with (
            guard_write(folder, self.size, ModelError, "writing frozen weights to"),
            tempfile.TemporaryFile(dir=folder, buffering=0) as file,
        ):
            file.truncate(self.size)
            for p in held:
                file.seek(self._ranges[id(p)][0])
                _write_whole(file, p.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            self._map = mmap.mmap(file.fileno(), self.size)
        for p in held:
            p.data = self._tensor(p)
            self.addresses.add(p.data_ptr())
        self._install_release(model)

    def _tensor(self, p: Tensor) -> Tensor:
        first, _ = self._ranges[id(p)]
        return torch.frombuffer(self._map, dtype=p.dtype, count=p.numel(), offset=first).view(p.shape)

    def _install_release(self, model: nn.Module) -> None:
        """A layer is given back when it has computed."""
        for layers in model.modules():
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                own = [self._ranges[id(p)] for p in layer.parameters() if id(p) in self._ranges]
                if own:
                    layer.register_forward_hook(lambda *_, own=own: self._release(own))

    def release(self) -> None:
        """None of it is resident any more; the next read brings it back."""
        self._release(list(self._ranges.values()))

    def _release(self, ranges: list[Range]) -> None:
        for first, size in ranges:
            self._map.madvise(mmap.MADV_DONTNEED, first, size)


def _write_whole(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
