"""Several ways for weights, of which one is used until it fails: what `sync.kind = "auto"` means between processes of
one machine. The fastest comes first, by what each moved at the start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rondel.core.errors import RondelError, SyncError
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Transport, Weights
from rondel.core.types import Manifest, Route, TensorInfo

SAMPLE = 32 << 20  # bytes that are sent to measure a way
WORTH = 64 << 20  # bytes of weights below which nothing is measured: every way takes less time than measuring it
TENSOR = 4 << 20  # bytes of one tensor of the sample


class TransportChoice:
    """`TransportChoice({"ipc": FromIpc(), "disk": FromDisk(folder)})`: the first, and after a fault the next.

    Driver and trainer have an instance each. A route names its way, so only the driver's knows which one is used.
    """

    def __init__(self, ways: Mapping[str, Transport]) -> None:
        self.ways = dict(ways)
        self.order = list(self.ways)

    @property
    def current(self) -> Transport:
        return self.ways[self.order[0]]

    @property
    def holds(self) -> Literal["never", "begin", "commit"]:
        return self.current.holds

    @property
    def names(self) -> Literal["module", "checkpoint"]:
        return self.current.names

    def prefer(self, order: list[str]) -> None:
        self.order = list(order)

    def fall_back(self) -> tuple[str, str] | None:
        """-> the way that failed and the one that is used from now on; None where there is no other."""
        if len(self.order) < 2:
            return None
        return self.order.pop(0), self.order[0]

    def way_of(self, route: Route) -> Transport:
        return self.ways[route.kind]

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        return await self.current.plan_route(trainer, engines)

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        return self.way_of(route).publish(route, version, weights)

    def send(self, route: Route, weights: Tensors) -> None:
        self.way_of(route).send(route, weights)

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield from self.way_of(route).receive(route, manifest, mine)

    def close(self) -> None:
        for way in self.ways.values():
            way.close()


# -- how fast each is ------------------------------------------------------------------------------


def sample_weights(device: str) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Numbers that nobody needs, as weights."""
    for i in range(SAMPLE // TENSOR):
        tensor = torch.arange(i, i + TENSOR // 4, dtype=torch.float32, device=device)
        yield TensorInfo(f"sample.{i}", tuple(tensor.shape), "float32", ""), tensor


class SampleEnd:
    """One end of a measurement, the trainer's or an engine's;
    what it is given is a transport that nothing else uses."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.ends: dict[str, Transport] = {}

    def publish(self, transport: Transport, route: Route) -> tuple[Manifest, Route]:
        return self.ends.setdefault(route.kind, transport).publish(route, 0, sample_weights(self.device))

    def send(self, route: Route) -> None:
        self.ends[route.kind].send(route, ((row.name, tensor) for row, tensor in sample_weights(self.device)))

    def receive(self, transport: Transport, manifest: Manifest, route: Route) -> int:
        """-> bytes that came, all of them right."""
        mine = {row.name: torch.empty(row.shape, device=self.device) for row in manifest.tensors}
        expected, came = {row.name: tensor for row, tensor in sample_weights(self.device)}, 0
        for name, tensor in self.ends.setdefault(route.kind, transport).receive(route, manifest, mine):
            if not torch.equal(tensor, expected[name]):
                raise SyncError(f"{name} of a sample arrived with other bits")
            came += tensor.nbytes
        return came

    def close(self, kind: str) -> None:
        if kind in self.ends:
            self.ends.pop(kind).close()


class AskedWorker(Protocol):
    """A worker that is called by name."""

    def ask(self, verb: str, *args: Any) -> Future[Any]: ...


def measure_ways(
    ways: Mapping[str, Transport], trainer: AskedWorker, engine: AskedWorker, patience: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Bytes a second between two workers, by kind, and of those that failed why. The second of two samples counts: the
    first opens connections and touches memory.
    """
    rates: dict[str, float] = {}
    failed: dict[str, str] = {}
    for kind, way in ways.items():
        try:
            for _ in range(2):
                began = time.perf_counter()
                route = Route(kind, (1, 0)) if way.holds == "begin" else Route(kind)
                manifest, route = trainer.ask("sample", "publish", way, route).result(patience)
                came = engine.ask("sample", "receive", way, manifest, route)
                trainer.ask("sample", "send", route).result(patience)
                if (size := came.result(patience)) != SAMPLE:
                    raise SyncError(f"{size} of {SAMPLE} bytes came")
                rates[kind] = size / (time.perf_counter() - began)
        except (RondelError, TimeoutError) as error:
            rates.pop(kind, None)
            failed[kind] = " ".join(str(error).split()) or type(error).__name__
        for worker in (trainer, engine):
            with suppress(RondelError, TimeoutError):
                worker.ask("sample", "close", kind).result(patience)
    return rates, failed


def order_ways(kinds: list[str], rates: Mapping[str, float], failed: Mapping[str, str]) -> tuple[list[str], str]:
    """The fastest first, those that were not measured behind, and none that failed. -> with the reason in words."""
    order = sorted((k for k in kinds if k not in failed), key=lambda kind: -rates.get(kind, 0.0))
    if not order:
        raise SyncError(
            f"no way for weights between trainer and engine: {'; '.join(f'{k}: {why}' for k, why in failed.items())}"
        )
    told = [f"{kind} {rates[kind] / 1e9:.2f} GB/s" for kind in order if kind in rates]
    told += [f"{kind} failed: {why}" for kind, why in failed.items()]
    return order, f"measured: {', '.join(told)}"
