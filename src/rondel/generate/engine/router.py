"""Many engines behind the verbs of one: replicas that serve the same weights, joined and lost while requests run.

    generate ──> its group's replica, while that is not `lean` requests ahead of the least loaded ──> else the least loaded
                 all full: wait, first come first served                replica dies: elsewhere, before those that wait

A group's requests go where its prompt lies already. A request that is sent again keeps
its key, so that under the same weights it draws the same tokens. What changes weights,
memory or pauses goes to all; whoever is
lost on the way is named and left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rondel.core.errors import EngineError, LawError, StalledError, WorkerError
from rondel.core.events import Advised, Warned, emit, stalled_error
from rondel.core.protocols import Interrupt, RolloutEngine, Tags
from rondel.core.types import Abort, Begin, Commit, Completion, EngineStatus, Message, Request, TokenScores
from rondel.generate.engine.concurrency import ConcurrencyController

REMEMBERED = 10_000  # groups whose replica is known
STATES = ("serving", "held", "asleep", "refusing")  # of several, the first that one of them is in


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


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request's place in the queue; what it waits for is a replica, or None when everything is aborted."""

    group: Any
    place: asyncio.Future[EngineReplica | None]


class EngineRouter:
    """`EngineRouter({"engine-0": e0, "engine-1": e1}, max_inflight=64)`. All replicas serve one version.

    max_inflight  requests of one replica; more wait here
    concurrency   who finds out how many of these should be at work
    lean          by how many requests a replica may be ahead of the least loaded one before its groups go elsewhere
    apart         nats a token by which replicas may differ on what they score
    patience      seconds in which a replica says that it lives
    deadline      seconds that a newcomer waits for its turn
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        *,
        max_inflight: int,
        concurrency: ConcurrencyController | None = None,
        version: int = 0,
        lean: int = 16,
        apart: float = 1e-3,
        patience: float = 30.0,
        deadline: float = 600.0,
    ) -> None:
        self.replicas = {name: EngineReplica(name, engine) for name, engine in engines.items()}
        self.concurrency, self._ended = concurrency, time.perf_counter()
        self._most, self.lean, self.apart, self.patience, self.deadline = max_inflight, lean, apart, patience, deadline
        self.version = version
        self.lost: dict[str, str] = {}  # who died, and of what
        self._homes: OrderedDict[Any, EngineReplica] = OrderedDict()
        self._queue: deque[QueuedRequest] = deque()
        self._still = asyncio.Condition()
        self._busy: set[str] = set()  # "update", "pause", "sleep": nobody joins meanwhile
        self._members: list[EngineReplica] = []  # of the update that is on its way

    @property
    def max_inflight(self) -> int:
        return self.concurrency.limit if self.concurrency is not None else self._most

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        group = (request.policy, request.adapter, request.namespace, request.id or tuple(request.tokens))
        again = False
        while True:
            try:
                async with asyncio.timeout(request.deadline):
                    replica = await self._acquire_replica(group, first=again)
            except TimeoutError as error:
                raise stalled_error(
                    f"a request waits for a replica since {request.deadline} s; each of {len(self.replicas)} has "
                    f"{self.max_inflight} already"
                ) from error
            if replica is None:
                return Completion([], [], [], "abort", prompt_tokens=len(request.tokens))
            try:
                done = await self._generate_on_replica(replica, request)
            finally:
                replica.load -= 1
                self._assign_requests()
            if done is not None:
                self._record_answer(len(done.tokens))
                return done
            again = True

    def _record_answer(self, tokens: int, *, pressed: bool = False) -> None:
        """An answer ended, so long after the one before."""
        if self.concurrency is not None:
            now = time.perf_counter()
            self.concurrency.record_answer(tokens, now - self._ended, felt=bool(self._queue), pressed=pressed)
            self._ended = now
            self._assign_requests()
            if found := self.concurrency.settled_limit():
                emit(Advised(self.version, *found))

    async def _generate_on_replica(self, replica: EngineReplica, request: Request) -> Completion | None:
        """-> None if the replica is no longer there to answer."""
        task = asyncio.ensure_future(replica.engine.generate(request))
        replica.tasks.add(task)
        try:
            await asyncio.wait([task])
        finally:
            replica.tasks.discard(task)
            task.cancel()
        if task.cancelled():  # it left, and its patience with it
            return None
        try:
            return task.result()
        except (EngineError, WorkerError, StalledError) as error:
            if await self._survives_error(replica, error):
                self._record_answer(0, pressed=isinstance(error, StalledError))
                raise
            return None

    async def score(self, request: Request) -> TokenScores:
        """Log-probabilities of all replicas, who must agree: what one of them alone gets wrong
        would go unseen (law 6).
        """
        asked = self._healthy_replicas()
        told: list[TokenScores] = await self._call_replicas(lambda engine: engine.score(request), asked)
        for other in told[1:]:
            gap = float(np.abs(np.subtract(other.logprobs, told[0].logprobs)).mean()) if request.tokens else 0.0
            if other.version != told[0].version or not gap <= self.apart:
                raise EngineError(
                    f"replicas at versions {told[0].version} and {other.version} differ by {gap:.3g} nats a token "
                    f"(limit {self.apart})"
                )
        return replace(told[0], replicas={replica.name: answer.logprobs for replica, answer in zip(asked, told)})

    # -- who gets a request ----------------------------------------------------------------------

    async def _acquire_replica(self, group: Any, *, first: bool) -> EngineReplica | None:
        """A replica with room, whose load already counts this request. `first`: it had one before."""
        self._refuse_if_alone()
        mine = QueuedRequest(group, asyncio.get_running_loop().create_future())
        self._queue.appendleft(mine) if first else self._queue.append(mine)
        self._assign_requests()
        try:
            return await mine.place
        except asyncio.CancelledError:
            if mine in self._queue:
                self._queue.remove(mine)
            elif (
                mine.place.done()
                and not mine.place.cancelled()
                and not mine.place.exception()
                and (got := mine.place.result())
            ):
                got.load -= 1
                self._assign_requests()
            raise

    def _assign_requests(self) -> None:
        """Give out what room there is, in the order of the queue."""
        while self._queue and (replica := self._choose_replica(self._queue[0].group)):
            mine = self._queue.popleft()
            if not mine.place.done():
                replica.load += 1
                mine.place.set_result(replica)

    def _choose_replica(self, group: Any) -> EngineReplica | None:
        able = [r for r in self._healthy_replicas() if not r.leaving and r.load < self.max_inflight]
        if not able:
            return None
        least = min(able, key=lambda r: r.load)
        home = self._homes.get(group)
        if home not in able:
            if home is None or home.leaving or home.fault or home.name in self.lost:
                self._homes[group] = least
            chosen = least
        else:
            chosen = home if home.load < least.load + self.lean else least
        self._homes.move_to_end(group)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def _healthy_replicas(self) -> list[EngineReplica]:
        return [replica for replica in self.replicas.values() if not replica.fault]

    # -- join, leave, die ------------------------------------------------------------------------

    async def add_engine(
        self, name: str, engine: RolloutEngine, bring: Callable[[RolloutEngine], Awaitable[int]]
    ) -> None:
        """`bring` gives it the weights that serve, and says which; it is admitted between
        updates, at the version of all others.
        """
        if name in self.replicas:
            raise EngineError(f"there is a replica '{name}' already; give the new one another name")
        try:
            async with asyncio.timeout(self.deadline):
                while (await bring(engine)) != self.version or self._busy:
                    async with self._still:
                        await self._still.wait_for(lambda: not self._busy)
        except TimeoutError as error:
            waits = ", ".join(sorted(self._busy)) or f"version {self.version}"
            raise stalled_error(f"replica '{name}' waits to join since {self.deadline:g} s: {waits}") from error
        self.lost.pop(name, None)
        self.replicas[name] = EngineReplica(name, engine)
        self._assign_requests()

    async def remove_engine(self, name: str, patience: float = 0.0) -> RolloutEngine:
        """It gets nothing new; what it has not ended after `patience` seconds is sent
        elsewhere. -> the engine, with nothing to do.
        """
        replica = self.replicas[name]
        replica.leaving = True
        try:
            if replica.tasks and patience > 0:
                await asyncio.wait(list(replica.tasks), timeout=patience)
        finally:
            self._drop_replica(replica, "it left")
            for task in list(replica.tasks):
                task.cancel()
        return replica.engine

    async def _survives_error(self, replica: EngineReplica, error: BaseException) -> bool:
        """Whether an error concerns one request, or the replica: one that refuses stays, one that is silent goes."""
        if self.replicas.get(replica.name) is not replica:
            return False
        try:
            async with asyncio.timeout(self.patience):
                state = (await replica.engine.status()).state
        except Exception:
            self._drop_replica(replica, f"{type(error).__name__}: {error}")
            emit(
                Warned(
                    f"replica '{replica.name}' is lost: {error}; {len(self.replicas)} are left, and what it had is sent "
                    f"to them"
                )
            )
            return False
        if state == "refusing":
            replica.fault = str(error)
            self._fail_if_alone()
        return not replica.fault

    def _drop_replica(self, replica: EngineReplica, why: str) -> None:
        if self.replicas.get(replica.name) is replica:
            del self.replicas[replica.name]
            self.lost[replica.name] = why
            self._fail_if_alone()

    def _fail_if_alone(self) -> None:
        """Nobody is left to serve those who wait."""
        try:
            self._refuse_if_alone()
        except EngineError as error:
            for mine in self._queue:
                if not mine.place.done():
                    mine.place.set_exception(error)
            self._queue.clear()

    def _refuse_if_alone(self) -> None:
        if not self._healthy_replicas():
            causes = self.lost | {r.name: r.fault for r in self.replicas.values()}
            raise EngineError(
                f"no engine is left: {'; '.join(f'{name}: {why}' for name, why in causes.items()) or 'none has joined'}"
            )

    # -- what goes to all ------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        """Sums; a state is that of the first in `STATES` that anyone is in."""
        self._refuse_if_gone()
        told: list[EngineStatus] = await self._call_replicas(
            lambda engine: engine.status(), list(self.replicas.values())
        )
        roots = {s.root for s in told}
        return EngineStatus(
            version=self.version,
            state=min((s.state for s in told), key=STATES.index),
            running=sum(s.running for s in told),
            waiting=sum(s.waiting for s in told) + len(self._queue),
            parked=sum(s.parked for s in told),
            pages_free=sum(s.pages_free for s in told),
            pages_cached=sum(s.pages_cached for s in told),
            pages_total=sum(s.pages_total for s in told),
            capabilities=frozenset.intersection(*(s.capabilities for s in told)),
            root=roots.pop() if len(roots) == 1 else "",
            bytes_copied=sum(s.bytes_copied for s in told),
            replicas=sum(s.replicas for s in told),
        )

    async def pause(self, how: Interrupt = "hold", lease: float = 600.0) -> None:
        self._busy.add("pause")
        await self._call_replicas(lambda engine: engine.pause(how, lease), list(self.replicas.values()))
        if how == "abort":
            for mine in self._queue:
                if not mine.place.done():
                    mine.place.set_result(None)
            self._queue.clear()

    async def resume(self) -> None:
        await self._call_replicas(lambda engine: engine.resume(), list(self.replicas.values()))
        await self._end_busy("pause")

    async def sleep(self, tags: Tags) -> None:
        self._busy |= {"sleep"} if tags else set()
        await self._call_replicas(lambda engine: engine.sleep(tags), list(self.replicas.values()))

    async def wake(self, tags: Tags) -> None:
        await self._call_replicas(lambda engine: engine.wake(tags), list(self.replicas.values()))
        await self._end_busy("sleep")

    async def receive(self, message: Message) -> int:
        """To all who heard its beginning. -> the version that all of them serve."""
        if isinstance(message, Begin):
            self._refuse_if_gone()
            self._busy.add("update")
            self._members = list(self.replicas.values())
        members = self._members = [r for r in self._members if self.replicas.get(r.name) is r]
        try:
            served = set(await self._call_replicas(lambda engine: engine.receive(message), members))
        finally:
            if isinstance(message, Commit | Abort):
                await self._end_busy("update")
        if len(served) > 1:
            raise LawError(
                f"after {type(message).__name__} the replicas serve versions {sorted(served)}; they must serve one"
            )
        if isinstance(message, Commit):
            self.version = served.pop()
            for replica in members:
                replica.fault = ""
            self._assign_requests()
        return self.version

    async def _end_busy(self, what: str) -> None:
        self._busy.discard(what)
        async with self._still:
            self._still.notify_all()

    async def _call_replicas(
        self, ask: Callable[[RolloutEngine], Awaitable[Any]], replicas: list[EngineReplica]
    ) -> list[Any]:
        """The answers of those who live. A fault of a living one is everyone's; the dead
        are dropped, until none is left.
        """
        answers = await asyncio.gather(*(ask(r.engine) for r in replicas), return_exceptions=True)
        good, fault = [], None
        for replica, answer in zip(replicas, answers):
            if not isinstance(answer, BaseException):
                good.append(answer)
            elif not isinstance(answer, EngineError | WorkerError | StalledError) or await self._is_serving(
                replica, answer
            ):
                fault = fault or answer
        if fault is not None:
            raise fault
        if not good:
            self._refuse_if_alone()
        return good

    async def _is_serving(self, replica: EngineReplica, error: BaseException) -> bool:
        await self._survives_error(replica, error)
        return self.replicas.get(replica.name) is replica

    def _refuse_if_gone(self) -> None:
        if not self.replicas:
            self._refuse_if_alone()
