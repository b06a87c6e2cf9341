"""Checkpoints of several ranks in the files of one: each rank writes the numbers that it holds, at their place.

    one machine       every rank writes its shards of weights, masters and moments; nothing is gathered
    several machines  the first rank writes, and is given one tensor at a time

What a family stores in another form than boxes of the module's tensors (interleaved experts) travels to the first
rank, too, one tensor at a time.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import CheckpointError, ModelError
from rondel.core.tensor_parts import Block, TensorPart
from rondel.models import names
from rondel.models.save import save_description
from rondel.system.files import guard_write
from rondel.train.part_file import (
    PartFile,
    StoredTensor,
    assign_owners,
    own_pieces,
    slice_box,
    whole_pieces,
    whole_shape,
)

if TYPE_CHECKING:
    from torch import nn

    from rondel.models.loaded_model import LoadedModel
    from rondel.train.optim import MasterWeights
    from rondel.train.parallel import SingleRank

Pieces = Iterator[tuple[str, Block, Tensor]]


@dataclass(slots=True)
class HeldParts:
    """What one rank holds, as all others are told.

    parts     of each tensor which numbers
    dtypes    of each tensor
    scalars   numbers beside it, such as AdamW's count of steps, under their names in the file
    """

    parts: dict[str, TensorPart] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """`NAME.safetensors` with what one optimizer moves and remembers.

    model   whose parameters its masters are
    small   beside them, the same on every rank
    alone   whether it holds masters that `model.safetensors` holds, too
    """

    name: str
    weights: MasterWeights
    model: nn.Module
    small: dict[str, Tensor]
    alone: bool = True


def lies_in_shards(loaded: LoadedModel, trained: Sequence[MasterWeights]) -> bool:
    """Whether ranks have shards of all that is trained, under names of a family that stores views of them."""
    if not all(weights.in_shards for weights in trained):
        return False
    try:
        names.checkpoint_pieces(loaded.model)
    except ModelError:
        return False
    return True


def save_parts(
    loaded: LoadedModel, ranks: SingleRank, folder: Path, optimizers: Sequence[OptimizerFile], needed: int
) -> None:
    """The model and its optimizers into `folder`, asked of all ranks. A fault of one rank is everyone's. `needed`:
    bytes.
    """
    apart = _same_folder(ranks, folder)
    plan = ModelPlan(loaded.model, ranks)
    _write_together(ranks, folder / "model.safetensors", plan.file, plan.pieces(apart), apart, needed)
    stored = {row.name for row in plan.file.rows} if loaded.dtype == torch.float32 else set()
    for file in optimizers:
        masters = MasterPlan(file, ranks, set() if file.alone else stored - file.weights.formatted_names)
        _write_together(ranks, folder / f"{file.name}.safetensors", masters.file, masters.pieces(apart), apart, needed)
    if ranks.is_leader:
        with guard_write(folder, needed):
            save_description(loaded, folder, loaded.dtype)


class ModelPlan:
    """`model.safetensors` under the names of the family: parameters, frozen ones too, and persistent buffers."""

    def __init__(self, model: nn.Module, ranks: SingleRank) -> None:
        self.model, self.ranks = model, ranks
        own = HeldParts(ranks.weight_parts(model))
        for name, tensor in ranks.held_weights(model):
            own.dtypes[name] = tensor.dtype
            if tuple(tensor.shape) != own.parts[name].shape:
                raise CheckpointError(
                    f"rank {ranks.rank} holds {list(tensor.shape)} of {name}, and by its mesh {own.parts[name].shape}"
                )
        told = ranks.all_gather_object(own)
        shapes, dtypes = _wholes(told)
        pieces = names.checkpoint_pieces(model)
        rows: list[StoredTensor] = []
        self.joined: set[str] = set()  # stored in another form than boxes
        for name, shape in shapes.items():
            if (stored := sum(prod(piece.size) for piece in pieces[name])) != prod(shape):
                raise CheckpointError(f"{name} has {prod(shape)} numbers, and a checkpoint of its family {stored}")
            boxes = [slice_box(shape, piece.size, piece.stride, piece.offset) for piece in pieces[name]]
            if None in boxes:
                self.joined.add(name)
                rows += [StoredTensor.whole(piece.name, dtypes[name], piece.size) for piece in pieces[name]]
            else:
                rows += [
                    StoredTensor(piece.name, dtypes[name], piece.size, name, box)
                    for piece, box in zip(pieces[name], boxes)
                    if box is not None
                ]
        self.buffers = {name: tensor for name, tensor in names.published_tensors(model, ())}
        rows += [StoredTensor.whole(name, tensor.dtype, tensor.shape) for name, tensor in self.buffers.items()]
        self.file = PartFile(rows)
        self.assigned = _assign(told, dtypes)[ranks.rank]

    def pieces(self, apart: bool) -> Pieces:
        """What this rank writes: what it was assigned, or on the first rank what cannot be written in parts."""
        if apart:
            held = self.ranks.held_weights(self.model)
            yield from own_pieces(self.assigned, ((name, t) for name, t in held if name not in self.joined))
        only = self.joined if apart else None
        for name, whole in self.ranks.full_weights(self.model, only) if only is None or only else ():
            if self.ranks.is_leader and name in self.joined:
                views = names.checkpoint_pieces(self.model)[name]
                yield from whole_pieces((view.name, view.view(whole.contiguous())) for view in views)
            elif self.ranks.is_leader:
                yield from whole_pieces([(name, whole)])
        if self.ranks.is_leader:
            yield from whole_pieces(self.buffers.items())


class MasterPlan:
    """A file with masters and moments of one optimizer, `master.NAME`, `exp_avg.NAME`, and what stands beside them."""

    def __init__(self, file: OptimizerFile, ranks: SingleRank, elsewhere: Container[str]) -> None:
        """`elsewhere`: masters that another file has."""
        weights = file.weights
        self.weights, self.ranks, self.elsewhere = weights, ranks, elsewhere
        parts, own = ranks.weight_parts(file.model), HeldParts()
        for i, name in enumerate(weights.names):
            for key, tensor in self._forms(i):
                if tensor.numel() == weights.sizes[i] and tensor.ndim:
                    own.parts[key], own.dtypes[key] = parts[name], tensor.dtype
                    if tuple(tensor.shape) != parts[name].shape:
                        raise CheckpointError(
                            f"rank {ranks.rank} holds {list(tensor.shape)} of {name}, and by its mesh "
                            f"{parts[name].shape}"
                        )
                else:
                    own.scalars[key] = tensor.cpu()
        told = ranks.all_gather_object(own)
        shapes, dtypes = _wholes(told)
        self.small = {**dict(chain.from_iterable(held.scalars.items() for held in told)), **file.small}
        self.file = PartFile(
            [StoredTensor.whole(key, dtypes[key], shape) for key, shape in shapes.items()]
            + [StoredTensor.whole(key, tensor.dtype, tensor.shape) for key, tensor in self.small.items()]
        )
        self.assigned = _assign(told, dtypes)[ranks.rank]

    def _forms(self, i: int) -> Iterator[tuple[str, Tensor]]:
        """What is kept of parameter `i` here, under its name in the file."""
        name = self.weights.names[i]
        if name not in self.elsewhere:
            yield f"master.{name}", self.weights.read_master(i)
        for key, tensor in self.weights.held_moments(i).items():
            yield f"{key}.{name}", tensor

    def pieces(self, apart: bool) -> Pieces:
        if apart:
            yield from own_pieces(
                self.assigned, chain.from_iterable(self._forms(i) for i in range(len(self.weights.names)))
            )
        else:
            for _, found in self.weights.gather_all(self._gather_forms):
                yield from whole_pieces((key, t) for key, t in found.items() if self.ranks.is_leader and t.ndim)
        if self.ranks.is_leader:
            yield from whole_pieces(self.small.items())

    def _gather_forms(self, i: int) -> dict[str, Tensor]:
        return {key: self.weights.gather_full(i, tensor) for key, tensor in self._forms(i)}


def _wholes(told: list[HeldParts]) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Shape and dtype of every tensor of which any rank has a part. CheckpointError where a holder lacks a number."""
    dtypes = {name: dtype for held in told for name, dtype in held.dtypes.items()}
    shapes = {name: whole_shape(held.parts[name] for held in told if name in held.parts) for name in dtypes}
    return shapes, dtypes


def _assign(told: list[HeldParts], dtypes: Mapping[str, torch.dtype]) -> list[dict[str, list[Block]]]:
    held = [{name: part for name, part in of.parts.items() if name in dtypes} for of in told]
    return assign_owners(held, {name: dtype.itemsize for name, dtype in dtypes.items()})


def _same_folder(ranks: SingleRank, folder: Path) -> bool:
    """Whether all ranks write into the same folder of one machine: to several, a file of many writers is no promise
    that every file system keeps.
    """
    told = ranks.all_gather_object((platform.node(), uuid.uuid4().hex))
    mark = folder / f".{told[0][1]}"
    if ranks.is_leader:
        with guard_write(folder):
            mark.touch()
    ranks.all_gather_object(None)
    seen = all(ranks.all_gather_object(mark.exists()))
    if ranks.is_leader:
        mark.unlink()
    return seen and len({node for node, _ in told}) == 1


def _write_together(
    ranks: SingleRank, path: Path, file: PartFile, pieces: Iterable[tuple[str, Block, Tensor]], apart: bool, needed: int
) -> None:
    """All ranks give what is theirs, those that see the folder write it; an error of one is every rank's."""
    _agree(ranks, path, needed, lambda: file.create(path) if ranks.is_leader else None)
    _agree(ranks, path, needed, lambda: file.write(path if apart or ranks.is_leader else None, pieces))


def _agree(ranks: SingleRank, path: Path, needed: int, work: Callable[[], None]) -> None:
    fault: CheckpointError | None = None
    try:
        work()
    except OSError as error:
        try:
            with guard_write(path, needed):
                raise error
        except CheckpointError as told:
            fault = told
    if failed := [error for error in ranks.all_gather_object(fault) if error is not None]:
        raise failed[0]
