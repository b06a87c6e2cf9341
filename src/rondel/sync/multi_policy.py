"""One update of several policies: the transport of each, joined. The transaction
around them stays one (sync/update.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

from rondel.core.errors import LawError
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Transport, Weights
from rondel.core.types import Manifest, Route


class MultiPolicyTransport:
    """The driver's end of them all: `MultiPolicyTransport({"policy": FromIpc(), "critic": FromIpc()})`,
    which are of one kind.

    A route carries {policy: its route}. The trainers' and the engines' ends are their own, of one policy each.
    """

    def __init__(self, each: Mapping[str, Transport]) -> None:
        self.each = dict(each)

    @property
    def holds(self) -> Literal["never", "begin", "commit"]:
        return next(iter(self.each.values())).holds

    @property
    def names(self) -> Literal["module", "checkpoint"]:
        return next(iter(self.each.values())).names

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        """Of the policies that these engines have: `trainer` and `engines` are several,
        too, and have their parts in `each`.
        """
        parts: Any = trainer
        ours: list[Any] = list(engines)
        routes = {}
        for name, way in self.each.items():
            if mine := [engine.trained[name] for engine in ours if name in engine.trained]:
                routes[name] = await way.plan_route(parts.each[name], mine)
        return Route("policies", routes)

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        self._raise_driver_only()

    def send(self, route: Route, weights: Tensors) -> None:
        self._raise_driver_only()

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        self._raise_driver_only()

    def close(self) -> None:
        for way in self.each.values():
            way.close()

    def _raise_driver_only(self) -> NoReturn:
        raise LawError(
            "the weights of several policies move by the transport of each; only the driver has them together"
        )
