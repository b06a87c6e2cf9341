"""An engine elsewhere that ends: its requests are asked again of the next one, an update is not."""

from __future__ import annotations

import asyncio

import pytest

from rondel.assemble.remote_workers import RemoteEngine
from rondel.core.errors import StalledError, SyncError, WorkerError
from rondel.core.types import Completion, EngineStatus, Manifest, Request, Route, TokenScores
from rondel.sync.update import WeightUpdate


class Worker:
    """Ends at a verb."""

    def __init__(self, at: str = "") -> None:
        self.at, self.fate, self.version = at, "", 0

    @property
    def alive(self) -> bool:
        return not self.fate

    def _ends(self, verb: str) -> None:
        if verb == self.at:
            self.fate = f"worker engine-0 was ended by SIGKILL in {verb}"
        if self.fate:
            raise WorkerError(self.fate)

    async def ready(self) -> None: ...
    async def open(self, longest: int) -> None: ...
    def dismiss(self) -> None: ...

    async def generate(self, request: Request) -> Completion:
        self._ends("generate")
        return Completion([1], [0.0], [self.version], "stop", prompt_tokens=1)

    async def status(self) -> EngineStatus:
        self._ends("status")
        return EngineStatus(
            version=self.version, state="serving", running=0, waiting=0, parked=0, pages_free=1, pages_cached=0, pages_total=1,
            capabilities=frozenset(), root="", bytes_copied=0, replicas=1,
        )  # fmt: skip

    async def receive(self, message) -> int:
        self._ends(type(message).__name__)
        self.version = getattr(message, "version", self.version)
        return self.version

    async def score(self, request: Request) -> TokenScores:
        self._ends("score")
        return TokenScores([0.0] * len(request.tokens), self.version)

    async def pause(self, how, lease) -> None:
        self._ends("pause")

    async def resume(self) -> None:
        self._ends("resume")


class Trainer:
    version = 0

    async def publish(self, route: Route) -> tuple[Manifest, Route]:
        return Manifest(1, (), f"root-{self.version}"), route

    async def send(self, route: Route) -> None: ...


class Transport:
    holds = "commit"

    async def plan_route(self, trainer, engines) -> Route:
        return Route("fake", None)


async def zeros(tokens) -> list[float]:
    return [0.0] * len(tokens)


def made(at: str) -> tuple[RemoteEngine, WeightUpdate, list[Worker]]:
    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker())
        return started[-1]

    engine = RemoteEngine(Worker(at), start, 8)
    update = WeightUpdate(Transport(), probe=[1, 2], score=zeros, tolerance=1e-3, deadline=20.0)
    engine.catch_up = update.catch_up
    return engine, update, started


def test_a_request_is_asked_again_of_the_next_engine():
    engine, _, started = made("generate")
    assert asyncio.run(engine.generate(Request([1]))).tokens == [1]
    assert len(started) == 1 == engine.restarts


@pytest.mark.parametrize("verb", ["status", "Begin", "pause", "Commit", "resume", "score"])
def test_an_engine_that_ends_in_an_update_ends_the_update(verb):
    """At once, whatever it was asked for: one that mended it would wait for the update, that is for itself."""
    engine, update, started = made(verb)

    async def work() -> None:
        with pytest.raises((WorkerError, SyncError)):
            await asyncio.wait_for(update(Trainer(), engine), 5)
        assert not started
        assert await asyncio.wait_for(engine.restart_if_dead(), 5) and len(started) == 1
        assert await asyncio.wait_for(update(Trainer(), engine), 5) == 1

    asyncio.run(work())


@pytest.mark.parametrize("who", ["publish", "score", "status"])
def test_nothing_in_an_update_waits_for_ever(who):
    """An answer that does not come, from one who lives: named, within the deadline (law 10)."""
    engine, update, _ = made("")
    trainer, update.deadline = Trainer(), 0.2

    async def silent(*_):
        await asyncio.sleep(60)

    setattr(trainer if who == "publish" else engine._worker, who, silent)
    with pytest.raises(StalledError, match=r"(the trainer|the engine|engine 0): no answer to .* for 0.2 s"):
        asyncio.run(asyncio.wait_for(update(trainer, engine), 5))
