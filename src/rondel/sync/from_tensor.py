"""Hand over the tensors themselves: in one process nothing is copied when trainer and engine share the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Weights
from rondel.core.types import Manifest, Route


class FromTensor:
    """The route carries {HF name: tensor}. An engine whose tensors are the trainer's own finds 0 bytes to copy.

    holds   "never" where they are: the trainer has already written over what the engine reads.
            "begin" where the engine has its own
    """

    names: Literal["module", "checkpoint"] = "module"

    def __init__(self, holds: Literal["never", "begin"] = "never") -> None:
        self.holds: Literal["never", "begin", "commit"] = holds

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        return Route("tensor")

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        held = [(row, tensor) for row, tensor in weights]
        return Manifest(version, tuple(row for row, _ in held)), Route(
            "tensor", {row.name: tensor for row, tensor in held}
        )

    def send(self, route: Route, weights: Tensors) -> None: ...

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield from route.data.items()

    def close(self) -> None: ...
