"""Weights for an engine of several processes: each rank takes its part of every tensor, and proves the whole.

    ipc or tcp, several writers   every rank pulls its own part of what a trainer's ranks wrote ──> their sums give the
    digest of the whole
    ipc, disk               every rank maps or reads the publication itself │ digest of the whole ──> its own part
    tensor, distributed     the first rank takes it in and passes it on     │ alike
A part is compared again at the commit where it was written over the weights or copied to another device.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.protocols import PartSource
from rondel.core.tensor_parts import TensorPart
from rondel.core.types import Begin, Manifest, Route, TensorInfo
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver, check_digest
from rondel.models import names
from rondel.models.names import DigestSums, digest_length
from rondel.models.shard_cut import part_of

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.models.collectives import RankGroup
    from rondel.models.serving_part import ServingPart
    from rondel.models.tensor_cuts import TensorCuts

READ_BY_ALL = ("ipc", "disk", "tcp")  # what every process can open
PASSED_ON = ("tensor", "distributed")


class PartDigests:
    """Digests of whole tensors of which each rank of `cuts` has a part, and nobody more: the sums of all parts, added
    up. What several ranks have a copy of is read whole by each, which compares the digest itself.

    parts   what this rank reads of each tensor
    values  the sums of all, one behind the other; those of all ranks together are those of the whole
    """

    def __init__(self, rows: Sequence[TensorInfo], cuts: TensorCuts, device: torch.device) -> None:
        self.parts: dict[str, TensorPart] = {}
        self.rows: dict[str, TensorInfo] = {}  # of those that are read in parts
        for row in rows:
            whole, cut, ranks = TensorPart.whole(row.shape), cuts.cuts.get(row.name), cuts.ranks
            each = [part_of(whole, cut, ranks.size, rank) for rank in range(ranks.size)]
            apart = sum(part.numel for part in each) == whole.numel
            self.parts[row.name] = each[ranks.index] if apart else whole
            if apart:
                self.rows[row.name] = row
        sizes = [prod(row.shape) * getattr(torch, row.dtype).itemsize for row in self.rows.values()]
        lengths = [digest_length(size) for size in sizes]
        self.values = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        self._sums = {
            name: DigestSums(size, device=device, values=own)
            for name, size, own in zip(self.rows, sizes, self.values.split(lengths))
        }

    def add_part(self, name: str, part: Tensor) -> None:
        """What this rank has of a tensor that is read in parts, once."""
        for block in self.parts[name].blocks:
            box = part
            for dim, (first, n) in enumerate(zip(block.here, block.size)):
                box = box.narrow(dim, first, n)
            self._sums[name].add_box(self.rows[name].shape, block.start, box.to(self.values.device))

    def find_wrong(self, ranks: RankGroup) -> list[str]:
        """Names of tensors that are not as they were announced; all ranks ask at the same time (or add their
        `values`).
        """
        ranks.all_reduce(self.values)
        return [name for name, row in self.rows.items() if self._sums[name].digest() != row.digest]


def wrong_tensors(found: Sequence[str]) -> str:
    return f"{len(found)} tensors arrived with other bits than were sent, first {found[0]}"


class PartReceiver(WeightReceiver):
    """One rank's side of an update."""

    def __init__(self, part: ServingPart, transports: Mapping[str, Transport]) -> None:
        super().__init__(part.loaded, transports)
        self.part = part
        self._joined: dict[str, tuple[Tensor, set[str]]] = {}  # tensors of the module that have come in part
        self._written: dict[str, str] = {}  # digests of parts, by the module's names
        self.proof: PartDigests | None = None  # where only parts are read

    def begin_update(self, begin: Begin, version: int) -> None:
        super().begin_update(begin, version)
        self._joined, self._written, self.proof = {}, {}, None

    def open_route(self, route: Route) -> tuple[dict[str, Tensor], Generator[tuple[str, Tensor], None, None]]:
        found, source = super().open_route(route), self._transports.get(route.kind)
        if isinstance(source, PartSource) and source.has_parts(route):
            assert self._begun is not None
            cuts = self.part.cuts
            self.proof = PartDigests(self._begun.manifest.tensors, cuts, self.loaded.device)
        return found

    def _open_stream(
        self, route: Route, manifest: Manifest, mine: dict[str, Tensor]
    ) -> Generator[tuple[str, Tensor], None, None]:
        source = self._transports.get(route.kind)
        if self.proof is not None and isinstance(source, PartSource):
            yield from source.receive_parts(route, manifest, self.proof.parts)
        else:
            yield from super()._open_stream(route, manifest, mine)

    def _arriving_shape(self, row: TensorInfo) -> tuple[int, ...]:
        return row.shape if self.proof is None else self.proof.parts[row.name].shape

    def _whole_shapes(self) -> dict[str, names.TensorShape]:
        return self.part.module

    def _expected_tensors(self, asked: list[str]) -> dict[str, names.TensorShape]:
        if (encoded := self._encoded) is not None:
            plain = self.part.module if encoded.under_module else self.part.checkpoint
            return encoded.plain_shapes(plain) | encoded.shapes
        return self.part.checkpoint if names.tensor_slices(self.loaded.model, asked) else self.part.module

    def _own_tensors(self) -> dict[str, Tensor]:
        own = dict(self.loaded.model.named_parameters()) | dict(self.loaded.model.named_buffers())
        plain = [name for name in self._awaited if self._encoded is None or name not in self._encoded]
        return {name: own[self._parts[name][0] if self._parts else name].detach() for name in plain}

    def _take_tensor(self, row: TensorInfo, tensor: Tensor, mine: dict[str, Tensor], *, beside: bool) -> None:
        if self.proof is not None and row.name in self.proof.rows:
            self.proof.add_part(row.name, tensor)
            self._keep_part(row.name, tensor, mine[row.name], beside=beside)
            return
        check_digest(row, tensor)
        of, piece = self._parts.get(row.name, (row.name, None))
        whole: Tensor | None = tensor
        if piece is not None and not piece.all:
            whole = self._join_piece(of, piece, tensor, mine[row.name])
        if whole is None:
            return
        own = self.part.cuts.split(of, whole)
        if beside:
            own = own.clone(memory_format=torch.contiguous_format)
        self._keep_part(of, own, mine[row.name], beside=beside)

    def _keep_part(self, of: str, own: Tensor, target: Tensor, *, beside: bool) -> None:
        """This rank's part of one of the module's tensors, until the commit or in its place."""
        if beside:
            self.staged.tensors[of] = own
        else:
            target.copy_(own)
            self.bytes_copied += target.nbytes
        if not beside or own.device != target.device:
            self._written[of] = names.tensor_digest(own)

    def _join_piece(self, of: str, piece: names.TensorSlice, tensor: Tensor, target: Tensor) -> Tensor | None:
        """The whole tensor of the module, once all of its pieces are here."""
        if of not in self._joined:
            shape = self.part.cuts.shapes.get(of, target.shape)
            left = {name for name, (owner, _) in self._parts.items() if owner == of}
            self._joined[of] = torch.empty(shape, dtype=target.dtype, device=tensor.device), left
        whole, left = self._joined[of]
        piece.view(whole).copy_(tensor)
        left.discard(piece.name)
        return None if left else self._joined.pop(of)[0]

    def _compare_manifest(self, manifest: Manifest) -> None:
        """Each part as it was cut from a tensor whose digest was right."""
        own = dict(self.loaded.model.named_parameters()) | dict(self.loaded.model.named_buffers())
        wrong = [name for name, digest in self._written.items() if names.tensor_digest(own[name]) != digest]
        if wrong:
            raise SyncError(wrong_tensors(wrong))

    def drop_update(self) -> bool:
        self._joined = {}
        return super().drop_update()
