"""Weights for an engine of several processes: each rank takes its part of every tensor, and proves the whole.

    ipc, disk               every rank maps or reads the publication itself │ digest of the whole ──> its own part
    tensor, distributed     the first rank takes it in and passes it on     │ alike
A part is compared again at the commit where it was written over the weights or copied to another device.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.types import Begin, Commit, Manifest, Route, TensorInfo
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.models import names

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.lock_step import LockStep
    from rondel.models.serving_part import ServingPart

READ_BY_ALL = ("ipc", "disk")  # what every process of a machine can open
PASSED_ON = ("tensor", "distributed")


class PartReceiver(WeightReceiver):
    """One rank's side of an update."""

    def __init__(self, part: ServingPart, transports: Mapping[str, Transport]) -> None:
        super().__init__(part.loaded, transports)
        self.part = part
        self._joined: dict[str, tuple[Tensor, set[str]]] = {}  # tensors of the module that have come in part
        self._written: dict[str, str] = {}  # digests of parts, by the module's names

    def begin_update(self, begin: Begin, version: int) -> None:
        super().begin_update(begin, version)
        self._joined, self._written = {}, {}

    def _expected_tensors(self, asked: list[str]) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.part.checkpoint if names.tensor_slices(self.loaded.model, asked) else self.part.module

    def _own_tensors(self) -> dict[str, Tensor]:
        own = dict(self.loaded.model.named_parameters()) | dict(self.loaded.model.named_buffers())
        return {name: own[self._parts[name][0] if self._parts else name].detach() for name in self._awaited}

    def _take_tensor(self, row: TensorInfo, tensor: Tensor, mine: dict[str, Tensor], *, beside: bool) -> None:
        self._check_digest(row, tensor)
        of, piece = self._parts.get(row.name, (row.name, None))
        whole: Tensor | None = tensor
        if piece is not None and not piece.all:
            whole = self._join_piece(of, piece, tensor, mine[row.name])
        if whole is None:
            return
        own, target = self.part.cuts.split(of, whole), mine[row.name]
        if beside:
            self._beside[of] = own.clone(memory_format=torch.contiguous_format)
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
            raise SyncError(f"{len(wrong)} tensors arrived with other bits than were sent, first {wrong[0]}")

    def drop_update(self) -> bool:
        self._joined = {}
        return super().drop_update()


class LeadReceiver(PartReceiver):
    """The first rank's side: the others take the same tensors in the same order, and tell what failed."""

    def __init__(self, lead: LockStep, transports: Mapping[str, Transport]) -> None:
        super().__init__(lead.part, transports)
        self.lead = lead

    def _open_stream(
        self, route: Route, manifest: Manifest, mine: dict[str, Tensor]
    ) -> Generator[tuple[str, Tensor], None, None]:
        if route.kind not in (*READ_BY_ALL, *PASSED_ON):
            raise SyncError(
                f"weights come by '{route.kind}', which an engine of {self.lead.size} processes does not take: use "
                f"{', '.join((*READ_BY_ALL, *PASSED_ON))}"
            )
        lead, passed, whole = self.lead, route.kind in PASSED_ON or isinstance(route.data, dict), False
        assert self._begun is not None
        with lead.together():
            lead.tell(self._begun)
            lead.tell(Route("passed on") if passed else route)
            lead.send("open")
        try:
            for name, tensor in super()._open_stream(route, manifest, mine):
                with lead.together():
                    lead.send("take", name=name, passed=[*_kind_of(tensor)] if passed else [])
                    if passed:
                        lead.compute.broadcast(tensor.detach().to(lead.part.loaded.device).contiguous().view(-1).view(torch.uint8))
                yield name, tensor
            whole = True
            self._raise_faults("read")
        finally:
            if not whole and not lead.lost:
                lead.send_later("drop")

    def _raise_faults(self, do: str, **facts: object) -> None:
        with self.lead.together():
            if do:
                self.lead.send(do, **facts)
            faults = self.lead.channel.report("")
        if told := [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]:
            raise SyncError("; ".join(told))

    def commit_update(self, commit: Commit) -> None:
        self._check_commit(commit)
        self._untouched = False  # from here on one rank may have what another has not
        with self.lead.together():
            self.lead.send("commit", version=commit.version, root=commit.root)
        try:
            super().commit_update(commit)
        finally:
            self._raise_faults("")

    def drop_update(self) -> bool:
        if self._begun is not None:
            self.lead.send_later("drop")
        return super().drop_update()


def _kind_of(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
