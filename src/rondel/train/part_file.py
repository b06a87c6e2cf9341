"""One safetensors file that several ranks write, each its own numbers: nobody has more than its part of a tensor.

    header: names, shapes, places  │ tensor a ·············· │ tensor b ········ │
    the first rank                   rank 0 ─┘ └─ rank 1       rank 1 ─┘ └─ rank 0

The file is the one that a single writer would write.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rondel.core.tensor_parts import Block, Place, TensorPart

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
AHEAD = 256 << 20  # bytes that a writer may be ahead of its disk


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file: the numbers of `box` in the whole tensor `source`."""

    name: str
    dtype: torch.dtype
    shape: Place
    source: str
    box: Block

    @classmethod
    def whole(cls, name: str, dtype: torch.dtype, shape: Sequence[int]) -> StoredTensor:
        shape, zero = tuple(shape), (0,) * len(shape)
        return cls(name, dtype, shape, name, Block(zero, shape, zero))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class PartFile:
    """Where each tensor of a file lies. Every writer makes the same plan, one of them the file."""

    def __init__(self, rows: Iterable[StoredTensor]) -> None:
        self.rows = sorted(rows, key=lambda row: (-row.dtype.itemsize, row.name))
        places = list(itertools.accumulate((row.nbytes for row in self.rows), initial=0))
        told = {
            row.name: {"dtype": KINDS[row.dtype], "shape": row.shape, "data_offsets": (first, end)}
            for row, first, end in zip(self.rows, places, places[1:])
        }
        header = json.dumps({"__metadata__": {"format": "pt"}, **told}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self.header = len(header).to_bytes(8, "little") + header
        self.size = len(self.header) + places[-1]
        self._of: dict[str, list[tuple[StoredTensor, int]]] = {}
        for row, first in zip(self.rows, places):
            self._of.setdefault(row.source, []).append((row, len(self.header) + first))

    def create(self, path: Path) -> None:
        """The header, and room for all tensors."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)

    def write(self, path: Path | None, pieces: Iterable[tuple[str, Block, Tensor]]) -> None:
        """Pieces (source, block, the part in which the block lies), on the disk when this returns; without a path they
        are only asked for. They are asked for to their end whatever the disk says, for other ranks give something of
        each.
        """
        fault: OSError | None = None
        file: DiskWriter | None = None
        try:
            file = None if path is None else DiskWriter(path)
        except OSError as error:
            fault = error
        for source, block, part in pieces:
            if file is None or fault is not None:
                continue
            try:
                for row, at in self._of.get(source, ()):
                    _write_box(file, row, at, block, part)
            except OSError as error:
                fault = error
        if file is not None:
            file.close()
        if fault is not None:
            raise fault


class DiskWriter:
    """Writes at places of a file that is there. It waits for the disk every `AHEAD` bytes: at the end alone that would
    take as long as all of them, and who shows no progress for place.patience seconds is ended as stuck.
    """

    def __init__(self, path: Path) -> None:
        self.file, self.ahead = os.open(path, os.O_WRONLY), 0

    def write(self, piece: memoryview, at: int) -> None:
        while len(piece):
            done = os.pwrite(self.file, piece[: AHEAD - self.ahead], at)
            at, piece, self.ahead = at + done, piece[done:], self.ahead + done
            if self.ahead >= AHEAD:
                os.fsync(self.file)
                self.ahead = 0

    def close(self) -> None:
        try:
            os.fsync(self.file)
        finally:
            os.close(self.file)


def _write_box(file: DiskWriter, row: StoredTensor, at: int, block: Block, part: Tensor) -> None:
    """What the stored tensor, which begins at byte `at`, has of a block: runs of neighbours, each where it belongs."""
    if (common := block.overlap(row.box)) is None:
        return
    for dim, (first, n) in enumerate(zip(common.here, common.size)):
        part = part.narrow(dim, first, n)
    raw = part.detach().to("cpu", row.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
    start = [a - b for a, b in zip(common.start, row.box.start)]
    # of as many dimensions as the box has whole, and one more, the numbers are neighbours
    outer = len(start)
    while outer and common.size[outer - 1 :] == row.box.size[outer - 1 :]:
        outer -= 1
    outer = max(outer - 1, 0)
    strides = [prod(row.box.size[dim + 1 :]) for dim in range(len(start))]
    length = prod(common.size[outer:]) * row.dtype.itemsize
    for n, index in enumerate(itertools.product(*map(range, common.size[:outer]))):
        place = [*map(sum, zip(start, index)), *start[outer:]]
        first = at + sum(a * b for a, b in zip(place, strides)) * row.dtype.itemsize
        file.write(raw[n * length : (n + 1) * length], first)


def assign_owners(
    held: Sequence[Mapping[str, TensorPart]], itemsize: Mapping[str, int]
) -> list[dict[str, list[Block]]]:
    """Who of several holders gives what of each tensor: every number once, and of replicas all give alike much. -> for
    each holder the blocks of each tensor.
    """
    given: Counter[int] = Counter()
    assigned: list[dict[str, list[Block]]] = [{} for _ in held]
    for name in dict.fromkeys(name for parts in held for name in parts):
        taken: list[Block] = []
        for holder in sorted((i for i, parts in enumerate(held) if name in parts), key=lambda i: (given[i], i)):
            own = list(held[holder][name].blocks)
            for before in taken:
                own = [rest for block in own for rest in block.without(before)]
            if own:
                assigned[holder][name] = own
                given[holder] += sum(block.numel for block in own) * itemsize[name]
                taken += own
    return assigned


def whole_shape(parts: Iterable[TensorPart]) -> Place:
    """Of a tensor whose parts these are: as far as any of them reaches."""
    found: Place = ()
    for block in (block for part in parts for block in part.blocks):
        end = tuple(a + n for a, n in zip(block.start, block.size))
        found = tuple(map(max, end, found)) if found else end
    return found


def slice_box(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Block | None:
    """The box of a contiguous tensor that a strided view of it is, with sides of 1 where the view has none; None where
    it is no box: transposed, or every second number.
    """
    start, sides, left = list[int](), list[int](), list(zip(size, stride))
    for dim in range(len(shape)):
        step = prod(shape[dim + 1 :])
        first, offset = divmod(offset, step)
        fits = bool(left) and left[0][1] == step and first + left[0][0] <= shape[dim]
        start.append(first)
        sides.append(left.pop(0)[0] if fits else 1)
    return None if left else Block(tuple(start), tuple(sides), tuple(start))


def own_pieces(
    assigned: Mapping[str, list[Block]], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Block, Tensor]]:
    """Of tensors that are kept in parts, what is assigned of each."""
    for name, tensor in tensors:
        for block in assigned.get(name, ()):
            yield name, block, tensor


def whole_pieces(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Block, Tensor]]:
    """The same of whole ones."""
    for name, tensor in tensors:
        yield name, Block((0,) * tensor.ndim, tuple(tensor.shape), (0,) * tensor.ndim), tensor
