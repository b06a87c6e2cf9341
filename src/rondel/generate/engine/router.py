"""Many engines behind the verbs of one: replicas that serve the same weights, joined and lost while requests run.

    generate ──> its group's replica, while that is not `lean` requests ahead of the least loaded ──> else the least loaded
                 no group: who knows most of its prompt, 64 tokens less for each request that it has
                 all full: wait, first come first served                replica dies: elsewhere, before those that wait

A group's requests go where its prompt lies already, and the next turn of an episode where the last one does. A request
that is sent again keeps its key, so that under the same weights it draws the same tokens. What changes weights,
memory or pauses goes to all; whoever is
lost on the way is named and left behind. One that can be started again is, whatever found out that it ended;
requests wait for it where no other replica is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from math import inf

import numpy as np

from rondel.core.errors import EngineError, LawError, StalledError, WorkerError
from rondel.core.events import Advised, emit, stalled_error
from rondel.core.protocols import Interrupt, Progress, RestartableEngine, RolloutEngine, Tags
from rondel.core.types import (
    IDS,
    Abort,
    Begin,
    Commit,
    Completion,
    EngineStatus,
    Message,
    Request,
    TokenColumn,
    TokenScores,
)
from rondel.generate.engine.concurrency import ConcurrencyController
from rondel.generate.engine.replica_fleet import EngineReplica, ReplicaFleet, merge_progress
from rondel.generate.engine.request_queue import RequestQueue
from rondel.system.loop_turns import TURN_TOKENS, take_loop_turn

STATES = ("serving", "held", "asleep", "refusing")  # of several, the first that one of them is in


class EngineRouter:
    """`EngineRouter({"engine-0": e0, "engine-1": e1}, max_inflight=64)`. All replicas serve one version.

    max_inflight  requests of one replica; more wait here
    concurrency   who finds out how many of these should be at work
    lean          by how many requests a replica may be ahead of the least loaded one before its groups go elsewhere
    apart         nats a token by which replicas may differ on what they score
    patience      seconds in which a replica says that it lives
    deadline      seconds that a newcomer waits for its turn
    restartable   replicas that are started again when they end, by name; read when one does
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
        restartable: Mapping[str, RestartableEngine] | None = None,
    ) -> None:
        self._restartable = {} if restartable is None else restartable  # an empty one may fill later
        self.fleet = ReplicaFleet(
            engines,
            patience=patience,
            bring_back=lambda name: self._bring_back(name) if name in self._restartable else None,
            deserted=lambda error: self.queue.fail_all(error),
        )
        self.replicas, self.lost = self.fleet.replicas, self.fleet.lost
        self.queue = RequestQueue(self.fleet, cap=lambda: self.max_inflight, lean=lean)
        self.concurrency, self._ended = concurrency, time.perf_counter()
        self._most, self.apart, self.deadline = max_inflight, apart, deadline
        self.version = version
        self._still = asyncio.Condition()
        self._busy: set[str] = set()  # "update", "pause", "sleep": nobody joins meanwhile
        self._members: list[EngineReplica] = []  # of the update that is on its way
        self._coming = version  # what it brings

    @property
    def max_inflight(self) -> int:
        return self.concurrency.limit if self.concurrency is not None else self._most

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        scope = (request.policy, request.adapter, request.namespace)
        group = (*scope, request.id or hash(tuple(request.tokens)))
        again = False
        while True:
            try:
                async with asyncio.timeout(request.deadline):
                    replica = await self.queue.acquire_replica(group, scope, request.tokens, first=again)
            except TimeoutError as error:
                raise stalled_error(
                    f"a request waits for a replica since {request.deadline} s; each of {len(self.replicas)} has "
                    f"{self.max_inflight} already, and {len(self.fleet.returning)} are being started again"
                ) from error
            if replica is None:
                return Completion.empty("abort", len(request.tokens))
            try:
                done = await self._generate_on_replica(replica, request)
            finally:
                self.queue.release_replica(replica)
            if done is not None:
                if len(done.tokens) > TURN_TOKENS:
                    await take_loop_turn()
                self.queue.locations.record(scope, TokenColumn.of(IDS, request.tokens) + done.tokens, replica)
                self._record_answer(len(done.tokens))
                return done
            again = True

    def _record_answer(self, tokens: int, *, pressed: bool = False) -> None:
        """An answer ended, so long after the one before."""
        if self.concurrency is not None:
            now = time.perf_counter()
            self.concurrency.record_answer(tokens, now - self._ended, felt=bool(self.queue), pressed=pressed)
            self._ended = now
            self.queue.assign_requests()
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
            if await self.fleet.survives_error(replica, error):
                self._record_answer(0, pressed=isinstance(error, StalledError))
                raise
            return None

    async def progress(self, known: Mapping[int, int]) -> Progress:
        """Of all replicas that answer; who does not is found out by those whose requests it has."""
        asked = (replica.engine for replica in self.fleet.healthy)
        return await merge_progress(asked, known)

    async def score(self, request: Request) -> TokenScores:
        """Log-probabilities of all replicas, who must agree: what one of them alone gets wrong
        would go unseen (law 6).
        """
        asked = self.fleet.healthy
        told: list[TokenScores] = await self.fleet.call(lambda engine: engine.score(request), asked)
        for other in told[1:]:
            gap = float(np.abs(np.subtract(other.logprobs, told[0].logprobs)).mean()) if request.tokens else 0.0
            if other.version != told[0].version or not gap <= self.apart:
                raise EngineError(
                    f"replicas at versions {told[0].version} and {other.version} differ by {gap:.3g} nats a token "
                    f"(limit {self.apart})"
                )
        return replace(told[0], replicas={replica.name: answer.logprobs for replica, answer in zip(asked, told)})

    # -- join, leave, die ------------------------------------------------------------------------

    async def add_engine(
        self, name: str, engine: RolloutEngine, bring: Callable[[RolloutEngine], Awaitable[int]]
    ) -> None:
        """`bring` gives it the weights that serve, and says which; it is admitted between updates, at the version of
        all others, or at the one that they get next where only the trainer's own weights could be brought. Where there
        are no others it says which version serves: they may all have ended between a commit and the end of its update.
        """
        if name in self.replicas:
            raise EngineError(f"there is a replica '{name}' already; give the new one another name")
        try:
            async with asyncio.timeout(self.deadline):
                while ((version := await bring(engine)) < self.version and self.replicas) or self._busy:
                    async with self._still:
                        await self._still.wait_for(lambda: not self._busy)
        except TimeoutError as error:
            waits = ", ".join(sorted(self._busy)) or f"version {self.version}"
            raise stalled_error(f"replica '{name}' waits to join since {self.deadline:g} s: {waits}") from error
        if not self.replicas:
            self.version = version
        self.lost.pop(name, None)
        self.replicas[name] = EngineReplica(name, engine)
        self.queue.assign_requests()

    async def _bring_back(self, name: str) -> None:
        engine = self._restartable[name]
        while name in self.lost:
            try:
                await engine.restart_if_dead()
                await self.add_engine(name, engine, engine.caught_up)
            except WorkerError:
                if not await engine.restart_if_dead():  # another's fault: that of the trainer that sends the weights
                    raise

    async def bring_back_lost(self) -> bool:
        """Every lost replica that can be started again serves, or the error says why not. -> was there any?"""
        for name in [name for name in self.lost if name in self._restartable]:
            self.fleet.begin_return(name)
        for task in (tasks := list(self.fleet.returning.values())):
            await asyncio.shield(task)
        return bool(tasks)

    async def remove_engine(
        self, name: str, patience: float = 0.0, between: AbstractAsyncContextManager[None] | None = None
    ) -> RolloutEngine:
        """It gets nothing new; what it has not ended after `patience` seconds goes on elsewhere from the tokens that it
        has: drawn anew it would more often be short (law 15). `between`: what it waits for then, and leaves inside.
        -> the engine, with nothing to do.
        """
        await self.fleet.cancel_return(name)
        replica = self.replicas[name]
        replica.leaving = True
        try:
            if replica.tasks and patience > 0:
                await asyncio.wait(list(replica.tasks), timeout=patience)
            async with between or nullcontext():
                if replica.tasks:
                    await self._return_unfinished(replica)
                self._let_go(replica)
        finally:
            self._let_go(replica)
        return replica.engine

    async def _return_unfinished(self, replica: EngineReplica) -> None:
        """Every request of it answers with what is written; one of a replica that cannot is begun again elsewhere."""
        with suppress(EngineError, WorkerError, StalledError, TimeoutError):
            async with asyncio.timeout(self.fleet.patience):
                await replica.engine.pause("abort")
                if replica.tasks:
                    await asyncio.wait(list(replica.tasks))

    def _let_go(self, replica: EngineReplica) -> None:
        self.fleet.drop_replica(replica, "it left")
        for task in list(replica.tasks):
            task.cancel()

    # -- what goes to all ------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        """Sums; a state is that of the first in `STATES` that anyone is in."""
        self.fleet.refuse_if_empty()
        told: list[EngineStatus] = await self.fleet.call(lambda engine: engine.status(), self.fleet.all_replicas)
        roots = {s.root for s in told}
        return EngineStatus(
            version=self.version,
            state=min((s.state for s in told), key=STATES.index),
            running=sum(s.running for s in told),
            waiting=sum(s.waiting for s in told) + len(self.queue),
            parked=sum(s.parked for s in told),
            pages_free=sum(s.pages_free for s in told),
            pages_cached=sum(s.pages_cached for s in told),
            pages_total=sum(s.pages_total for s in told),
            capabilities=frozenset.intersection(*(s.capabilities for s in told)),
            root=roots.pop() if len(roots) == 1 else "",
            bytes_copied=sum(s.bytes_copied for s in told),
            replicas=sum(s.replicas for s in told),
        )

    async def pause(self, how: Interrupt = "hold", lease: float = inf) -> None:
        self._busy.add("pause")
        await self.fleet.call(lambda engine: engine.pause(how, lease), self.fleet.all_replicas)
        if how == "abort":
            self.queue.abort_all()

    async def resume(self) -> None:
        try:
            await self.fleet.call(lambda engine: engine.resume(), self.fleet.all_replicas)
        finally:  # one that ended while it was paused may come back
            await self._end_busy("pause")

    async def sleep(self, tags: Tags) -> None:
        self._busy |= {"sleep"} if tags else set()
        await self.fleet.call(lambda engine: engine.sleep(tags), self.fleet.all_replicas)

    async def wake(self, tags: Tags) -> None:
        try:
            await self.fleet.call(lambda engine: engine.wake(tags), self.fleet.all_replicas)
        finally:
            await self._end_busy("sleep")

    async def receive(self, message: Message) -> int:
        """To all who heard its beginning. -> the version that all of them serve."""
        if isinstance(message, Begin):
            self.fleet.refuse_if_empty()
            self._busy.add("update")
            self._members, self._coming = self.fleet.all_replicas, message.manifest.version
        members = self._members = [r for r in self._members if self.fleet.is_member(r)]
        try:
            served = set(await self.fleet.call(lambda engine: engine.receive(message), members))
        finally:
            if isinstance(message, Commit | Abort):
                await self._end_busy("update")
        # a newcomer may have been brought what is coming to the others only now
        ahead = not isinstance(message, Commit) and served <= {self.version, self._coming}
        if len(served) > 1 and not ahead:
            raise LawError(
                f"after {type(message).__name__} the replicas serve versions {sorted(served)}; they must serve one"
            )
        if isinstance(message, Commit):
            self.version = served.pop()
            self.queue.locations.forget()
            for replica in members:
                replica.fault = ""
            self.queue.assign_requests()
        return self.version

    async def _end_busy(self, what: str) -> None:
        self._busy.discard(what)
        async with self._still:
            self._still.notify_all()
