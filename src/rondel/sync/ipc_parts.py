"""Weights in the shared memory of several writers: who writes which numbers, and how a reader puts tensors together.

    trainer-0 ── its shards ──> segment 0 ┐                       engine: W = [ rows of 0 | rows of 1 ]
    trainer-1 ── its shards ──> segment 1 ┘ ── pulled by a plan ──>        or only its own part of W

Every number is written once: of replicas one writes it. Nothing is gathered before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.protocols import Weights
from rondel.core.tensor_parts import Block, Place, TensorPart
from rondel.core.types import Manifest, TensorInfo
from rondel.sync.tensor_bytes import HEAD, aligned
from rondel.sync.transfer_plan import Copy, TransferPlanner, plan_transfer, split_buckets

BUCKET = 64 << 20  # bytes that are copied at a time


AddressT = TypeVar("AddressT")


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A box of a tensor that lies in a segment, contiguous: where it begins in the whole tensor, and its size."""

    name: str
    start: Place
    size: Place


@dataclass(frozen=True, slots=True)
class PartAddresses:
    """`segments[i]` (of sync/from_ipc.py or sync/from_tcp.py) holds `pieces[i]`, one behind the other."""

    segments: tuple[Any, ...]
    pieces: tuple[tuple[WrittenPiece, ...], ...]


def assign_writers(
    held: Sequence[Mapping[str, TensorPart]], itemsize: Mapping[str, int]
) -> list[dict[str, list[Block]]]:
    """Who of several holders writes what, so that every number is written once and all write alike much. -> for each
    the blocks of each tensor, in its part and in the whole.
    """
    wholes: dict[str, TensorPart] = {}
    for parts in held:
        for name, part in parts.items():
            top = [max((b.start[d] + b.size[d] for b in part.blocks), default=0) for d in range(len(part.shape))]
            before = wholes[name].shape if name in wholes else (0,) * len(top)
            wholes[name] = TensorPart.whole(map(max, top, before))
    assigned: list[dict[str, list[Block]]] = [{} for _ in held]
    for copy in plan_transfer(held, [wholes], itemsize):
        assigned[copy.source].setdefault(copy.name, []).append(Block(copy.to, copy.size, copy.at))
    return assigned


class PartReader:
    """Puts tensors together from the segments of several writers. The plan is made once for a layout."""

    def __init__(self) -> None:
        self._layout: Any = None
        self._plan: dict[str, list[Copy]] = {}
        self.bytes_read = 0  # of the last update

    def assemble(
        self, buffers: Sequence[Tensor], place: PartAddresses, manifest: Manifest, wanted: Mapping[str, TensorPart]
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the manifest, or the part of it that is wanted; a view where one piece has all of it."""
        pieces = [piece for held in place.pieces for piece in held]
        stored = [t for buffer, held in zip(buffers, place.pieces) for t in _open_pieces(buffer, held, manifest)]
        if (layout := (place.pieces, tuple(wanted.items()))) != self._layout:
            self._layout, self._plan = layout, plan_pieces(pieces, manifest, wanted)
        self.bytes_read = 0
        for row in manifest.tensors:
            part, copies = wanted[row.name], self._plan[row.name]
            self.bytes_read += sum(copy.bytes for copy in copies)
            whole = stored[copies[0].source] if len(copies) == 1 else None
            if whole is not None and tuple(whole.shape) == part.shape == copies[0].size and not whole.is_cuda:
                yield row.name, whole
                continue
            device = stored[copies[0].source].device if copies else torch.device("cpu")
            out = torch.zeros if part.numel < prod(part.shape) else torch.empty  # padding is 0
            tensor = out(part.shape, dtype=getattr(torch, row.dtype), device=device)
            for bucket in split_buckets(copies, BUCKET):
                for copy in bucket:
                    narrow(tensor, copy.to, copy.size).copy_(narrow(stored[copy.source], copy.at, copy.size))
            yield row.name, tensor


def narrow(tensor: Tensor, start: Place, size: Place) -> Tensor:
    """A box of it, as a view."""
    for dim, (first, n) in enumerate(zip(start, size)):
        tensor = tensor.narrow(dim, first, n)
    return tensor


def _open_pieces(buffer: Tensor, pieces: Sequence[WrittenPiece], manifest: Manifest) -> Iterator[Tensor]:
    dtypes, at = {row.name: getattr(torch, row.dtype) for row in manifest.tensors}, HEAD
    for piece in pieces:
        if piece.name not in dtypes:
            raise SyncError(f"{piece.name} was written, and was not announced")
        size = prod(piece.size) * dtypes[piece.name].itemsize
        if at + size > len(buffer):
            raise SyncError(f"a trainer's memory has {len(buffer)} bytes, and {piece.name} ends at {at + size}")
        yield buffer[at : at + size].view(dtypes[piece.name]).view(piece.size)
        at = aligned(at + size)


def write_whole(
    weights: Weights, write: Callable[[Iterator[Tensor]], AddressT]
) -> tuple[AddressT, tuple[TensorInfo, ...]]:
    """`write` is given the tensors one at a time. -> where it wrote them, and what they are."""
    rows: list[TensorInfo] = []

    def tensors() -> Iterator[Tensor]:
        for row, tensor in weights:
            rows.append(row)
            yield tensor

    return write(tensors()), tuple(rows)


def written_pieces(assigned: Sequence[Mapping[str, list[Block]]]) -> tuple[tuple[WrittenPiece, ...], ...]:
    """What each of several writers writes, in its order."""
    return tuple(
        tuple(WrittenPiece(name, block.start, block.size) for name, blocks in own.items() for block in blocks)
        for own in assigned
    )


def plan_pieces(
    pieces: Sequence[WrittenPiece], manifest: Manifest, wanted: Mapping[str, TensorPart]
) -> dict[str, list[Copy]]:
    """The copies of each wanted tensor; a source is the number of a piece."""
    planner = TransferPlanner()
    held: dict[str, list[tuple[int, TensorPart]]] = {}
    for number, piece in enumerate(pieces):
        zero = (0,) * len(piece.size)
        part = TensorPart(piece.size, (Block(piece.start, piece.size, zero),))
        held.setdefault(piece.name, []).append((number, part))
    sizes = {row.name: getattr(torch, row.dtype).itemsize for row in manifest.tensors}
    return {
        name: planner.plan_tensor(name, sizes[name], held.get(name, []), [(0, part)]) for name, part in wanted.items()
    }
