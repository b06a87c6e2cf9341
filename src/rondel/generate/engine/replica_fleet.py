"""The replicas behind a router: who is healthy, who refuses, who is lost and of what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import EngineError, StalledError, WorkerError
from rondel.core.events import Warned, emit
from rondel.core.protocols import Progress, RolloutEngine


async def merge_progress(engines: Iterable[Any], known: Mapping[int, int]) -> Progress:
    """What several engines say of the same requests. One that raises says nothing."""
    told = await asyncio.gather(*(engine.progress(known) for engine in engines), return_exceptions=True)
    found: Progress = {}
    for one in told:
        found |= one if isinstance(one, dict) else {}
    return found


@dataclass(eq=False, slots=True)
class EngineReplica:
    """
    load     requests that it has, never more than the cap
    fault    why it refuses; a commit heals it
    leaving  it gets nothing new
    """

    name: str
    engine: RolloutEngine
    load: int = 0
    fault: str = ""
    leaving: bool = False
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)


class ReplicaFleet:
    """
    replicas  by name
    lost      who died, and of what
    patience  seconds in which a replica says that it lives
    deserted  told when no healthy replica is left
    """

    def __init__(
        self, engines: Mapping[str, RolloutEngine], *, patience: float, deserted: Callable[[EngineError], None]
    ) -> None:
        self.replicas = {name: EngineReplica(name, engine) for name, engine in engines.items()}
        self.lost: dict[str, str] = {}
        self.patience, self._deserted = patience, deserted

    @property
    def healthy(self) -> list[EngineReplica]:
        return [replica for replica in self.replicas.values() if not replica.fault]

    @property
    def all_replicas(self) -> list[EngineReplica]:
        return list(self.replicas.values())

    def is_member(self, replica: EngineReplica) -> bool:
        return self.replicas.get(replica.name) is replica

    def refuse_if_deserted(self) -> None:
        if not self.healthy:
            causes = self.lost | {r.name: r.fault for r in self.replicas.values()}
            raise EngineError(
                f"no engine is left: {'; '.join(f'{name}: {why}' for name, why in causes.items()) or 'none has joined'}"
            )

    def refuse_if_empty(self) -> None:
        if not self.replicas:
            self.refuse_if_deserted()

    def drop_replica(self, replica: EngineReplica, why: str) -> None:
        if self.is_member(replica):
            del self.replicas[replica.name]
            self.lost[replica.name] = why
            self._report_desertion()

    async def survives_error(self, replica: EngineReplica, error: BaseException) -> bool:
        """Whether an error concerns one request, or the replica: one that refuses stays, one that is silent goes."""
        if not self.is_member(replica):
            return False
        try:
            async with asyncio.timeout(self.patience):
                state = (await replica.engine.status()).state
        except Exception:
            self.drop_replica(replica, f"{type(error).__name__}: {error}")
            emit(
                Warned(
                    f"replica '{replica.name}' is lost: {error}; {len(self.replicas)} are left, and what it had is sent "
                    f"to them"
                )
            )
            return False
        if state == "refusing":
            replica.fault = str(error)
            self._report_desertion()
        return not replica.fault

    async def call(self, ask: Callable[[RolloutEngine], Awaitable[Any]], replicas: list[EngineReplica]) -> list[Any]:
        """The answers of those who live. A fault of a living one is everyone's; the dead
        are dropped, until none is left.
        """
        answers = await asyncio.gather(*(ask(r.engine) for r in replicas), return_exceptions=True)
        good, fault = [], None
        for replica, answer in zip(replicas, answers):
            if not isinstance(answer, BaseException):
                good.append(answer)
            elif not isinstance(answer, EngineError | WorkerError | StalledError) or await self._outlives_error(
                replica, answer
            ):
                fault = fault or answer
        if fault is not None:
            raise fault
        if not good:
            self.refuse_if_deserted()
        return good

    async def _outlives_error(self, replica: EngineReplica, error: BaseException) -> bool:
        await self.survives_error(replica, error)
        return self.is_member(replica)

    def _report_desertion(self) -> None:
        try:
            self.refuse_if_deserted()
        except EngineError as error:
            self._deserted(error)
