"""Weights of a trainer of several ranks on their way into a transport."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.protocols import PartTransport
from rondel.core.tensor_parts import Block, TensorPart
from rondel.core.types import Manifest, Route, TensorInfo
from rondel.models import names
from rondel.models.names import DigestSums, digest_length, encoding_of
from rondel.train.parallel import WeightPublisher

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.optim import MasterWeights
    from rondel.train.parallel import SingleRank


class RankPublisher(WeightPublisher):
    """The same of several ranks: each gives its own shards, where the transport takes parts of ranks where these are;
    else they are gathered once an update, one tensor at a time.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: SingleRank,
        transport: Transport | None,
        masters: MasterWeights | None = None,
    ) -> None:
        super().__init__(loaded, ranks, transport, masters)
        self.held: list[tuple[str, Tensor]] = []  # gathered for a publication, and still to be sent
        self.gathered = 0  # bytes of other ranks that came to this one for the last publication
        # by the kind of a route, asked of all ranks at its first publication; None where they gather
        self._parts: dict[str, PublishedParts | None] = {}

    def publish(self, route: Route, version: int) -> tuple[Manifest, Route] | None:
        self.held, self.gathered = [], 0
        transport = self._way_of(route)
        if parts := self._find_parts(transport, route):
            told = parts.publish(version)
            return told and (replace(told[0], base=names.base_digest(self.loaded.model)), told[1])
        tensors = self._whole_tensors(transport)
        if not self.ranks.is_leader:
            return None
        if transport.holds == "begin":
            tensors = self._keep_on_host(tensors)
        manifest, route = transport.publish(route, version, names.describe_tensors(tensors))
        return replace(manifest, base=names.base_digest(self.loaded.model)), route

    def send(self, route: Route) -> None:
        if self.ranks.is_leader:
            held, self.held = self.held, []
            assert held, "send before publish"
            device = self.loaded.device
            self._way_of(route).send(route, ((name, tensor.to(device)) for name, tensor in held))

    def _find_parts(self, transport: Transport, route: Route) -> PublishedParts | None:
        if encoding_of(self.loaded.model) is not None:
            return None
        if route.kind not in self._parts:
            takes = isinstance(transport, PartTransport)
            where = platform.node() if getattr(transport, "one_machine", True) else ""
            apart = set(self.ranks.all_gather_object((takes, where))) == {(True, where)}
            self._parts[route.kind] = PublishedParts(self.loaded, self.ranks, transport) if apart else None
        return self._parts[route.kind]

    def _keep_on_host(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same, kept in host memory until they are sent: shards are gathered once an update."""
        for name, tensor in tensors:
            self.held.append((name, tensor.cpu()))
            yield name, tensor

    def _gather_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The ranks that do not lead give their shards at once."""
        # asked on every rank: what is gathered of the model goes, and the next pass gathers it on all of them
        own = {name: part.numel for name, part in self.ranks.weight_parts(self.loaded.model).items()}
        tensors = super()._gather_tensors()
        if self.ranks.is_leader:
            return self._count_gathered(tensors, own)
        for _ in tensors:
            pass
        return tensors

    def _count_gathered(
        self, tensors: Iterator[tuple[str, Tensor]], own: dict[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.gathered += (tensor.numel() - own.get(name, 0)) * tensor.element_size()
            yield name, tensor


class PublishedParts:
    """Each rank writes its own shards; every number is written by one of those that hold it. The digest of a tensor is
    added up from what the ranks hold, so that what an engine puts together is compared with the trainer's numbers
    themselves.
    """

    def __init__(self, loaded: LoadedModel, ranks: SingleRank, transport: Any) -> None:
        """`transport`: a PartTransport."""
        self.loaded, self.ranks, self.transport = loaded, ranks, transport
        own = ranks.weight_parts(loaded.model)
        mine: dict[str, tuple[TensorPart, torch.dtype]] = {}
        for name, tensor in ranks.held_weights(loaded.model):
            if tuple(tensor.shape) != own[name].shape:
                raise SyncError(
                    f"rank {ranks.rank} holds {list(tensor.shape)} of {name}, and by its mesh {list(own[name].shape)}"
                )
            mine[name] = own[name], tensor.dtype
        told = ranks.all_gather_object(mine)  # of some tensors only other ranks know
        self.dtypes = {name: dtype for of_rank in told for name, (_, dtype) in of_rank.items()}
        held = [{name: part for name, (part, _) in of_rank.items()} for of_rank in told]
        self.shapes = {name: _whole_shape([parts[name] for parts in held if name in parts]) for name in self.dtypes}
        assigned = transport.assign_parts(held, {name: dtype.itemsize for name, dtype in self.dtypes.items()})
        # in the order in which each rank goes through its tensors
        self.assigned = [
            {name: blocks[name] for name in of_rank if name in blocks} for of_rank, blocks in zip(told, assigned)
        ]

    def publish(self, version: int) -> tuple[Manifest, Route] | None:
        """Manifest and route on the leader. An error of one rank is every rank's."""
        sizes = {name: prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items()}
        lengths = [digest_length(size) for size in sizes.values()]
        values = torch.zeros(sum(lengths), dtype=torch.int64, device=self.loaded.device)
        sums = {
            name: DigestSums(size, device=values.device, values=own)
            for (name, size), own in zip(sizes.items(), values.split(lengths))
        }
        told: Any = None
        try:
            told = self.transport.write_parts(self._own_pieces(sums))
        except SyncError as error:
            told = error
        addresses = self.ranks.all_gather_object(told)
        if failed := [error for error in addresses if isinstance(error, SyncError)]:
            raise failed[0]
        self.ranks.all_reduce(values)
        if not self.ranks.is_leader:
            return None
        rows = tuple(
            TensorInfo(name, shape, str(self.dtypes[name]).removeprefix("torch."), sums[name].digest())
            for name, shape in self.shapes.items()
        )
        route = self.transport.route_parts(addresses, self.assigned)
        return Manifest(version, rows), replace(route, bytes=sum(sizes.values()))

    def _own_pieces(self, sums: dict[str, DigestSums]) -> Iterator[Tensor]:
        """What this rank writes, in order; each piece is added to the digest of its tensor on the way."""
        own = self.assigned[self.ranks.rank]
        for name, tensor in self.ranks.held_weights(self.loaded.model):
            for block in own.get(name, ()):
                piece = _box(tensor, block)
                sums[name].add_box(self.shapes[name], block.start, piece)
                yield piece


def _whole_shape(parts: list[TensorPart]) -> tuple[int, ...]:
    """Of a tensor whose parts these are: as far as any of them reaches."""
    blocks = [block for part in parts for block in part.blocks]
    ends = [tuple(a + n for a, n in zip(block.start, block.size)) for block in blocks]
    return tuple(map(max, *ends)) if len(ends) > 1 else ends[0]


def _box(tensor: Tensor, block: Block) -> Tensor:
    for dim, (first, n) in enumerate(zip(block.here, block.size)):
        tensor = tensor.narrow(dim, first, n)
    return tensor
