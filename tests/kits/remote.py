"""An engine elsewhere that ends at a chosen verb, and an update that it takes part in."""

from __future__ import annotations

from rondel.assemble.remote_workers import RemoteEngine
from rondel.core.errors import WorkerError
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
