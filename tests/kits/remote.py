"""An engine elsewhere that ends at a chosen verb, and an update that it takes part in."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

from rondel.assemble.placement import Deployment
from rondel.assemble.remote_workers import RemoteEngine
from rondel.core.errors import SyncError, WorkerError
from rondel.core.types import Completion, EngineStatus, Manifest, Request, Route, TensorInfo, TokenScores
from rondel.generate.engine.router import EngineRouter
from rondel.sync.update import WeightUpdate


class Worker:
    """Ends when it is asked for a verb for the n-th time, before it does it or (`late`) when it has. Its answers have a
    token a turn of the event loop. One that is to end at an Abort refuses the second version before.
    """

    def __init__(self, at: str = "", nth: int = 1, *, late: bool = False) -> None:
        self.at, self.left, self.late, self.fate, self.version = at, nth, late, "", 0
        self.held = self.aborts = False

    @property
    def alive(self) -> bool:
        return not self.fate

    def _ends(self, verb: str, *, late: bool = False) -> None:
        if verb == self.at and late == self.late:
            self.left -= 1
            if not self.left:
                self.fate = f"worker engine-0 was ended by SIGKILL in {verb}"
        if self.fate:
            raise WorkerError(self.fate)

    async def ready(self) -> None: ...
    async def open(self, longest: int) -> None: ...
    def dismiss(self) -> None: ...

    async def generate(self, request: Request) -> Completion:
        done = Completion([], [], [], "abort", prompt_tokens=1)
        while len(done.tokens) < request.sampling.max_tokens:
            self._ends("generate")
            if self.held and self.aborts:
                return done
            if not self.held:
                done.tokens.append(1), done.logprobs.append(0.0), done.versions.append(self.version)
            await asyncio.sleep(0)
        self._ends("generate", late=True)
        done.finish_reason = "stop"
        return done

    async def status(self) -> EngineStatus:
        self._ends("status")
        self._ends("status", late=True)
        return EngineStatus(
            version=self.version, state="serving", running=0, waiting=0, parked=0, pages_free=1, pages_cached=0, pages_total=1,
            capabilities=frozenset(), root="", bytes_copied=0, replicas=1,
        )  # fmt: skip

    async def receive(self, message) -> int:
        self._ends(verb := type(message).__name__)
        self.version = getattr(message, "version", self.version)
        if verb == "Route" and self.at == "Abort" and self.version:
            raise SyncError("the data is not what was announced")
        self._ends(verb, late=True)
        return self.version

    async def score(self, request: Request) -> TokenScores:
        self._ends("score")
        self._ends("score", late=True)
        return TokenScores([0.0] * len(request.tokens), self.version)

    async def pause(self, how, lease) -> None:
        self._ends("pause")
        self.held, self.aborts = True, how == "abort"
        self._ends("pause", late=True)

    async def resume(self) -> None:
        self._ends("resume")
        self.held = False
        self._ends("resume", late=True)

    async def sleep(self, tags) -> None:
        self._ends("sleep")

    async def wake(self, tags) -> None:
        self._ends("wake")


class Trainer:
    version = 1

    async def publish(self, route: Route) -> tuple[Manifest, Route]:
        return Manifest(self.version, (TensorInfo("w", (1,), "float32", f"{self.version}"),)), route

    async def send(self, route: Route) -> None: ...


class Transport:
    def __init__(self, holds: str = "commit") -> None:
        self.holds = holds

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


def deployed(worker: Worker, engines: int, update: WeightUpdate) -> SimpleNamespace:
    """A deployment of so many engines behind a router; the first one is `worker`. What is started again does not end."""
    remotes = {f"engine-{i}": RemoteEngine(Worker() if i else worker, Worker, 8) for i in range(engines)}
    for remote in remotes.values():
        remote.catch_up = update.catch_up

    async def no_lost_rank() -> None: ...

    router = EngineRouter(remotes, max_inflight=4, patience=5.0, restartable=remotes)
    placed = SimpleNamespace(engine=router, remotes=remotes, lost=no_lost_rank, bring_back_lost=router.bring_back_lost)
    placed.new_engine, placed.may_lose_engines = None, True
    for told, wanted in ((Deployment.may_lose_engines, True), (Deployment.stays_whole, False)):
        assert told.fget(placed) is wanted, "an update of engines that may end needs its delivery"
    placed.restart_engines = partial(Deployment.restart_engines, placed)
    return placed
