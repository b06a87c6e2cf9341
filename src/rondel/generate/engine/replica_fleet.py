"""The replicas behind a router: who is healthy, who refuses, who is lost and of what, and who of them comes back.

replicas ──it gives no sign of life──> lost ──if it can be started again──> returning ──it has caught up──> replicas
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import EngineError, StalledError, WorkerError, error_text
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
    replicas    by name
    lost        who died, and of what
    returning   those of them that are being started again
    patience    seconds in which a replica says that it lives
    bring_back  starts a lost replica again and adds it; None for one that does not come back
    deserted    told when no healthy replica is left, and none comes back
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        *,
        patience: float,
        bring_back: Callable[[str], Awaitable[None] | None],
        deserted: Callable[[EngineError], None],
    ) -> None:
        self.replicas = {name: EngineReplica(name, engine) for name, engine in engines.items()}
        self.lost: dict[str, str] = {}
        self.returning: dict[str, asyncio.Future[None]] = {}
        self.patience, self._bring_back, self._deserted = patience, bring_back, deserted

    @property
    def healthy(self) -> list[EngineReplica]:
        return [replica for replica in self.replicas.values() if not replica.fault]

    @property
    def all_replicas(self) -> list[EngineReplica]:
        return list(self.replicas.values())

    def is_member(self, replica: EngineReplica) -> bool:
        return self.replicas.get(replica.name) is replica

    def refuse_if_deserted(self) -> None:
        """What can wait for a replica that comes back is not refused."""
        if not self.healthy and not self.returning:
            raise self._desertion()

    def refuse_if_empty(self) -> None:
        """What must be answered now."""
        if not self.replicas:
            raise self._desertion()

    def _desertion(self) -> EngineError:
        causes = {
            name: f"{why} (it is started again)" * (name in self.returning) or why for name, why in self.lost.items()
        }
        causes |= {r.name: r.fault for r in self.replicas.values()}
        return EngineError(
            f"no engine is left: {'; '.join(f'{name}: {why}' for name, why in causes.items()) or 'none has joined'}"
        )

    def drop_replica(self, replica: EngineReplica, why: str) -> None:
        """For good: it left."""
        if self.is_member(replica):
            del self.replicas[replica.name]
            self.lost[replica.name] = why
            self._report_desertion()

    def _lose_replica(self, replica: EngineReplica, error: BaseException) -> None:
        """It gives no sign of life; where it can be started again, it is."""
        if not self.is_member(replica):
            return
        del self.replicas[replica.name]
        self.lost[replica.name] = error_text(error)
        self.begin_return(replica.name)
        goes_on = (
            "what it had waits until it is back"
            if self.returning and not self.replicas
            else f"{len(self.replicas)} are left, and what it had is sent to them"
        )
        emit(Warned(f"replica '{replica.name}' is lost: {error}; {goes_on}"))
        self._report_desertion()

    def begin_return(self, name: str) -> None:
        """Of a lost one, unless it is on its way or does not come back."""
        if name in self.returning or (work := self._bring_back(name)) is None:
            return
        task = self.returning[name] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._end_return(name, task))

    def _end_return(self, name: str, task: asyncio.Future[None]) -> None:
        del self.returning[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lost[name] = error_text(error)
        self._report_desertion()

    async def cancel_return(self, name: str) -> None:
        """Nobody wants it back."""
        if (task := self.returning.get(name)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def survives_error(self, replica: EngineReplica, error: BaseException) -> bool:
        """Whether an error concerns one request, or the replica: one that refuses stays, one that is silent goes."""
        if not self.is_member(replica):
            return False
        try:
            async with asyncio.timeout(self.patience):
                state = (await replica.engine.status()).state
        except Exception:
            self._lose_replica(replica, error)
            return False
        if state == "refusing":
            replica.fault = str(error)
            self._report_desertion()
        return not replica.fault

    async def call(self, ask: Callable[[RolloutEngine], Awaitable[Any]], replicas: list[EngineReplica]) -> list[Any]:
        """The answers of those who live. A fault of a living one is everyone's; the dead
        are dropped, until none is left. Nobody is waited for: a weight update that waited for one that comes back would
        wait for itself.
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
            raise self._desertion()
        return good

    async def _outlives_error(self, replica: EngineReplica, error: BaseException) -> bool:
        await self.survives_error(replica, error)
        return self.is_member(replica)

    def _report_desertion(self) -> None:
        try:
            self.refuse_if_deserted()
        except EngineError as error:
            self._deserted(error)
