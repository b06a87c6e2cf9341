"""Weights of a trainer on their way into a transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from rondel.core.types import Manifest, Route
from rondel.models import names

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.parallel import SingleRank


class WeightPublisher:
    """Gathers the shards of all ranks once an update and gives the tensors to the transport, one at a time."""

    def __init__(self, loaded: LoadedModel, ranks: SingleRank, transport: Transport | None) -> None:
        self.loaded, self.ranks, self.transport = loaded, ranks, transport
        self.held: list[tuple[str, Tensor]] = []  # gathered for a publication, and still to be sent

    def publish(self, route: Route, version: int) -> tuple[Manifest, Route] | None:
        """What the update consists of, and the way it takes; None on a rank that only gives its shards."""
        self.held = []
        tensors = self._gather_tensors()
        if not self.ranks.is_leader:
            return None
        transport = self.require_transport()
        if transport.holds == "begin" and self.ranks.size > 1:
            tensors = self._keep_on_host(tensors)
        manifest, route = transport.publish(route, version, names.describe_tensors(tensors))
        return replace(manifest, base=names.base_digest(self.loaded.model)), route

    def send(self, route: Route) -> None:
        """The tensors themselves, where the transport carries them after the engines said yes."""
        if self.ranks.is_leader:
            held, self.held = self.held, []
            assert held or self.ranks.size == 1, "send before publish"
            device = self.loaded.device
            self.require_transport().send(
                route, ((name, tensor.to(device)) for name, tensor in held) if held else self._gather_tensors()
            )

    def require_transport(self) -> Transport:
        assert self.transport is not None, "the trainer was built without a transport"
        return self.transport

    def _keep_on_host(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same, kept in host memory until they are sent: shards are gathered once an update."""
        for name, tensor in tensors:
            self.held.append((name, tensor.cpu()))
            yield name, tensor

    def _gather_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, one at a time, under the names that the transport carries. The ranks
        that do not lead give their shards at once.
        """
        model = self.loaded.model
        tensors = self.ranks.full_weights(model)
        if not self.ranks.is_leader:
            for _ in tensors:
                pass
        return names.published_tensors(model, tensors) if self.require_transport().names == "checkpoint" else tensors
