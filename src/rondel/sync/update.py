"""The one state machine of a weight update: publish -> begin -> data -> commit ->
version -> probe. It is a transaction (law 6).

Whatever the transport and however many the engines, 100 % of the names are
acknowledged by all before data moves, digests are compared before a version changes, and a
fixed probe is scored on both sides afterwards.
Anything else is an abort, for all of them.

    holds "never"    begin ── data ── commit ── probe                         who calls has parked the engines
    holds "begin"    pause ── begin ── data ── commit ── probe ── resume      failed: the engine refuses until a good
    update holds "commit"   begin ── data ── pause ── commit ── resume ── probe      failed before the commit: the old
    version goes on serving

With "commit" the weights lie apart once they are published: `publish` and `deliver` may be called one by one, and the
trainer may step in between. Its scores of the probe are those of the version that it published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rondel.core.errors import SyncError
from rondel.core.events import Synced, Warned, emit, stalled_error
from rondel.core.protocols import Interrupt, RolloutEngine, Trainer, Transport
from rondel.core.types import POLICY, Abort, Begin, Commit, EngineStatus, Manifest, Message, Request, Route
from rondel.sync.choice import TransportChoice
from rondel.sync.probe import ProbeComparison, of_policy

Score = Callable[[list[int]], Awaitable[list[float]]]  # the trainer's logprobs of a text
LEASE = 600.0  # seconds after which a paused engine that nobody resumes goes on by itself


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Published weights, and who receives them.

    holds   of the transport that published them
    scored  the trainer's logprobs of the probe under these weights, by policy
    began   `time.perf_counter()` when their update did
    """

    manifest: Manifest
    route: Route
    trainer: Trainer
    engines: tuple[RolloutEngine, ...]
    holds: str
    scored: dict[str, list[float]]
    began: float


class EngineMessages:
    """The same to every engine at once.

    deadline  seconds that an answer may take
    how       what happens to requests in flight where engines must stand still: hold, drain, abort
    """

    def __init__(self, deadline: float, how: Interrupt) -> None:
        self.deadline, self.how = deadline, how

    async def send(
        self, engines: Sequence[RolloutEngine], message: Message, also: dict[str, Awaitable[Any]] | None = None
    ) -> list[int]:
        """The same message to every engine at once. -> the version that each serves."""
        waits = {f"engine {i}": engine.receive(message) for i, engine in enumerate(engines)}
        return (await self.gather({**waits, **(also or {})}, type(message).__name__.lower()))[: len(engines)]

    async def statuses(self, engines: Sequence[RolloutEngine]) -> list[EngineStatus]:
        return await self.gather({f"engine {i}": engine.status() for i, engine in enumerate(engines)}, "its status")

    async def pause(self, engines: Sequence[RolloutEngine], parked: list[RolloutEngine]) -> float:
        """Those that decode, or have only just ceased to, stand between two steps when it returns. `parked` has them
        from before the first one is asked, for if one cannot be paused, the others are to go on. Answers that are
        ended first take as long as they are: there the deadline is for engines that do not move. -> since when.
        """
        for engine, status in zip(engines, await self.statuses(engines), strict=True):
            if status.state in ("serving", "refusing"):
                parked.append(engine)
        waits: dict[str, Awaitable[Any]] = {
            f"engine {i}": engine.pause(self.how, LEASE) for i, engine in enumerate(parked)
        }
        moves = partial(self.statuses, parked) if self.how == "drain" else None
        await self.gather(waits, "a pause", moves)
        return time.perf_counter()

    async def resume(self, parked: list[RolloutEngine], since: float) -> float:
        """-> seconds in which they stood still."""
        await self.gather({f"engine {i}": engine.resume() for i, engine in enumerate(parked)}, "its resumption")
        paused = time.perf_counter() - since if parked else 0.0
        parked.clear()
        return paused

    async def gather(
        self, waits: dict[str, Awaitable[Any]], what: str, moves: Callable[[], Awaitable[Any]] | None = None
    ) -> list[Any]:
        """All of them, or the first fault; the others end by themselves, because whoever
        waits has a deadline of its own. `moves`: where it tells another thing than before, the deadline begins again.
        """
        tasks = {asyncio.ensure_future(wait): name for name, wait in waits.items()}
        if not tasks:
            return []
        try:
            before = None if moves is None else await moves()
            while True:
                ended, late = await asyncio.wait(tasks, timeout=self.deadline, return_when=asyncio.FIRST_EXCEPTION)
                failed = [task for task in ended if task.cancelled() or task.exception()]
                if failed or not late or moves is None or (now := await moves()) == before:
                    break
                before = now
            if failed and late:
                _, late = await asyncio.wait(late, timeout=self.deadline)
            if failed:
                failed[0].result()
            if late:
                names = ", ".join(sorted(tasks[task] for task in late))
                runs = [status.running for status in before or () if isinstance(status, EngineStatus)]
                still = (
                    f", and {sum(runs)} requests still run of which none has ended meanwhile: see what the server does "
                    "with them, or take loop.in_flight = 'hold', which interrupts them"
                    if any(runs)
                    else ""
                )
                raise stalled_error(
                    f"{names}: no answer to {what} for {self.deadline:g} s{still}; the update is aborted"
                )
        finally:
            for task in tasks:
                task.cancel()
        return [task.result() for task in tasks]


class WeightUpdate:
    """`version = await WeightUpdate(transport, ...)(trainer, *engines)`. One at a time: a second call waits for the
    first.

    probe      tokens whose logprobs both sides must agree on after the commit; empty switches the probe off
    score      the trainer's logprobs of the probe
    others     the same of the policies beside the main one, by name: each is probed
    tolerance  largest allowed mean difference in nats a token
    moved      asked after a step with lr > 0: must the weights have changed since the last update?
    deadline   seconds that a message, or the data, may take
    how        what happens to requests in flight where the engines must stand still: hold, drain, abort
    """

    def __init__(
        self,
        transport: Transport,
        *,
        probe: list[int],
        score: Score,
        tolerance: float,
        others: Mapping[str, Score] | None = None,
        moved: Callable[[], bool] = lambda: False,
        deadline: float = 600.0,
        how: Interrupt = "hold",
    ) -> None:
        self.transport, self.probe, self.moved = transport, probe, moved
        self.comparison = ProbeComparison(tolerance)
        self.scores = {POLICY: score, **(others or {})}
        self.messages = EngineMessages(deadline, how)
        self.root: str | None = None
        self._last: Snapshot | None = None
        self._waiting: Snapshot | None = None  # published, and not delivered
        self._on_the_way = False  # did the last fault happen while a transport was at work?
        self._one = asyncio.Lock()

    async def __call__(self, trainer: Trainer, *engines: RolloutEngine) -> int:
        async with self._one:
            return await self._deliver_snapshot(await self._publish_snapshot(trainer, engines))

    @property
    def keeps_snapshots(self) -> bool:
        """Whether what is published stays as it is while the trainer steps."""
        return self.transport.holds == "commit"

    @property
    def has_ways(self) -> bool:
        """Whether weights can go another way where one has failed."""
        return isinstance(self.transport, TransportChoice)

    async def publish(self, trainer: Trainer, *engines: RolloutEngine) -> Snapshot:
        """The first half of an update, where snapshots are kept; the trainer is free when it returns."""
        assert self.keeps_snapshots, self.transport.holds
        async with self._one:
            return await self._publish_snapshot(trainer, engines)

    async def deliver(self, snapshot: Snapshot) -> int:
        """The second half; may be tried again until something else is published. -> the version served from now on."""
        async with self._one:
            return await self._deliver_snapshot(snapshot)

    async def catch_up(self, engine: RolloutEngine) -> int:
        """An engine that comes late takes what was published last from where it lies, also what is still on its way to
        the others: ranks that serve their own shards hold one version. Where that is gone, or only changes weights that
        it does not have, the trainer publishes once more. -> its version.
        """
        async with self._one:
            if self._last is None:
                return (await engine.status()).version
            newest = self._waiting or self._last
            manifest, route, trainer = newest.manifest, newest.route, newest.trainer
            if newest.holds == "begin" or _needs_base(route):
                manifest, route = await self._publish_weights(trainer, [engine])
            await self._deliver_weights(manifest, route, [engine], holds=newest.holds, send=trainer.send)
        return manifest.version

    async def join(self, engine: RolloutEngine, manifest: Manifest, route: Route) -> int:
        """The same for an engine that no trainer knows: `join(engine, *newest(folder))`."""
        async with self._one:
            await self._deliver_weights(manifest, route, [engine], holds="commit")
        return manifest.version

    @asynccontextmanager
    async def between_updates(self) -> AsyncIterator[None]:
        """No update is under way inside, and none begins: who receives one is counted before the weights travel."""
        async with self._one:
            yield

    async def _publish_snapshot(self, trainer: Trainer, engines: Sequence[RolloutEngine]) -> Snapshot:
        began = time.perf_counter()
        manifest, route = await self._publish_weights(trainer, engines)
        self._check_moved(manifest)
        self._waiting = Snapshot(
            manifest, route, trainer, tuple(engines), self.transport.holds, await self._score_probe(), began
        )
        return self._waiting

    async def _deliver_snapshot(self, snapshot: Snapshot) -> int:
        manifest, engines = snapshot.manifest, snapshot.engines
        paused, gap = await self._deliver_weights(
            manifest,
            snapshot.route,
            engines,
            holds=snapshot.holds,
            send=snapshot.trainer.send,
            scored=snapshot.scored,
        )
        copied = sum(status.bytes_copied for status in await self.messages.statuses(engines))
        # not before: an engine that ends has all of it made again
        self.root, self._last, self._waiting = manifest.root, snapshot, None
        emit(Synced(manifest.version, manifest.root, time.perf_counter() - snapshot.began, copied, gap, paused))
        return manifest.version

    async def _score_probe(self) -> dict[str, list[float]]:
        """The trainer's logprobs of the probe, by policy; none where it is switched off."""
        names = list(self.scores) if self.probe else []
        scored = await self.messages.gather(
            {f"the trainer{of_policy(name)}": self.scores[name](self.probe) for name in names}, "the probe"
        )
        return dict(zip(names, scored, strict=True))

    async def _probe_gap(
        self, engine: RolloutEngine, version: int, scored: Mapping[str, list[float]], policy: str
    ) -> float:
        asked: dict[str, Awaitable[Any]] = {"the engine": engine.score(Request(list(self.probe), policy=policy))}
        (answer,) = await self.messages.gather(asked, "the probe")
        return self.comparison.compare(scored[policy], answer, version, policy)

    async def _publish_weights(self, trainer: Trainer, engines: Sequence[RolloutEngine]) -> tuple[Manifest, Route]:
        (route,) = await self.messages.gather(
            {"an engine": self.transport.plan_route(trainer, list(engines))}, "how many they are"
        )
        with self._by_transport():
            return (await self.messages.gather({"the trainer": trainer.publish(route)}, "publish"))[0]

    @contextmanager
    def _by_transport(self) -> Iterator[None]:
        """What fails inside, another transport might have carried."""
        self._on_the_way = True
        yield
        self._on_the_way = False

    def makes_good(self, snapshot: Snapshot, error: Exception) -> bool:
        """After a delivery that failed beside a step: whether the next update brings engines what they need."""
        if self.fall_back(error):
            return True
        if not isinstance(error, SyncError) or not _needs_base(snapshot.route):
            return False
        why = " ".join(str(error).split())
        emit(
            Warned(
                f"version {snapshot.manifest.version} has not reached the engines ({why}); they get the next one whole"
            )
        )
        return True

    def fall_back(self, error: Exception) -> bool:
        """After an update that failed: whether the next one goes another way, which is said aloud."""
        failed, self._on_the_way = self._on_the_way, False
        if not failed or not isinstance(self.transport, TransportChoice):
            return False
        if (change := self.transport.fall_back()) is None:
            return False
        self.root = self._waiting = None  # names may be others now, and with them the root
        why = " ".join(str(error).split())
        emit(Warned(f"weights cannot travel by {change[0]} ({why}); from now on they go by {change[1]}"))
        return True

    async def _deliver_weights(
        self,
        manifest: Manifest,
        route: Route,
        engines: Sequence[RolloutEngine],
        *,
        holds: str,
        send: Callable[[Route], Awaitable[None]] | None = None,
        scored: Mapping[str, list[float]] | None = None,
    ) -> tuple[float, float]:
        """-> seconds in which the engines stood still, and the gap on the probe."""
        parked: list[RolloutEngine] = []
        since = paused = gap = 0.0
        try:
            if holds == "begin":
                since = await self.messages.pause(engines, parked)
            await self.messages.send(engines, Begin(manifest, beside=holds == "commit"))
            with self._by_transport():
                also = {"the trainer": send(route)} if send and holds == "begin" else {}
                await self.messages.send(engines, route, also=also)
            if holds == "commit":
                since = await self.messages.pause(engines, parked)
            for version in await self.messages.send(engines, Commit(manifest.version, manifest.root)):
                if version != manifest.version:
                    raise SyncError(
                        f"the engine says it serves version {version}, but {manifest.version} was committed"
                    )
            if holds == "commit":
                paused = await self.messages.resume(parked, since)
            if scored:
                gap = max(
                    [await self._probe_gap(engine, manifest.version, scored, of) for engine in engines for of in scored]
                )
        except BaseException as error:  # a cancelled update is an aborted one, too
            await self.messages.send(engines, Abort(f"{type(error).__name__}: {error}"))
            raise
        finally:
            paused = await self.messages.resume(parked, since) if parked else paused
        return paused, gap

    def _check_moved(self, manifest: Manifest) -> None:
        """The digest changes if and only if a non-zero update was applied, since the version before this one: the one
        that was delivered last, or a later one that reached nobody.
        """
        if self.root is None:
            return
        if self._waiting is not None and self._waiting.manifest.version < manifest.version:
            self.root = self._waiting.manifest.root
        if self.moved() and manifest.root == self.root:
            raise SyncError(
                "the trainer made a step with lr > 0, but the weights it publishes are bit for bit the old ones"
            )
        if not self.moved() and manifest.root != self.root:
            raise SyncError("no update was applied, but the published weights changed")


def _needs_base(route: Route) -> bool:
    """Whether it only changes weights that an engine must have; of several policies one of their routes."""
    parts = route.data.values() if isinstance(route.data, dict) else ()
    return bool(route.base) or any(isinstance(part, Route) and bool(part.base) for part in parts)
