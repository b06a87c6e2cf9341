"""Several policies behind the verbs of one engine: a request goes to the weights
that it names, an update is one for all.

    Request.policy = "critic" ──> the critic's engine          frozen: its weights never come, it counts versions with the others
    Begin, Route, Commit      ──> to each its part of the manifest and of the route; all commit, or nobody generates any more

One version has one number: it is that of the episode, whoever of its agents wrote a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from rondel.core.errors import EngineError, SyncError
from rondel.core.protocols import Interrupt, Progress, RolloutEngine, Tags
from rondel.core.registry import suggest_name
from rondel.core.types import (
    IDS,
    Abort,
    Begin,
    Commit,
    Completion,
    EngineStatus,
    Manifest,
    Message,
    Request,
    Route,
    TokenColumn,
    TokenScores,
)
from rondel.generate.engine.replica_fleet import merge_progress

STATES = ("serving", "held", "asleep", "refusing")  # of several, the first that one of them is in


class MultiPolicyEngine:
    """`MultiPolicyEngine({"policy": e0, "critic": e1}, frozen=["rival"])`, of which every name has an engine."""

    def __init__(
        self, engines: Mapping[str, RolloutEngine], *, frozen: Mapping[str, RolloutEngine] | None = None
    ) -> None:
        self.trained, self.frozen = dict(engines), dict(frozen or {})
        self.each: dict[str, Any] = self.trained | self.frozen
        self._version = 0
        self._begun: Manifest | None = None
        self._mixed = ""  # why some serve a version that others do not

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """An evaluation says which version was loaded."""
        self._version = version
        for engine in self.trained.values():
            engine.version = version  # type: ignore[attr-defined]

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._refuse_mixed()
        engine = self._engine_for(request)
        if request.policy not in self.frozen:
            return await engine.generate(request)
        # weights that never change answer a replayed request at once, under the version of then
        version = request.lines[-1][0] if request.lines else self._version
        done = await engine.generate(replace(request, lines=None))
        n = len(done.tokens)
        return replace(done, versions=TokenColumn(IDS, [version]) * n, stints=((version, n, n),))

    async def progress(self, known: Mapping[int, int]) -> Progress:
        return await merge_progress(self.each.values(), known)

    async def score(self, request: Request) -> TokenScores:
        scored = await self._engine_for(request).score(request)
        return replace(scored, version=self._version) if request.policy in self.frozen else scored

    def _engine_for(self, request: Request) -> RolloutEngine:
        if request.policy not in self.each:
            raise EngineError(
                f"a request for the policy '{request.policy}', which this run does not "
                f"have.{suggest_name(request.policy, list(self.each))} "
                f"It has {', '.join(self.each)}"
            )
        return self.each[request.policy]

    def _refuse_mixed(self) -> None:
        if self._mixed:
            raise EngineError(f"the engines refuse to generate until a good update: {self._mixed}")

    # -- what goes to all ------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        """Sums; a state is that of the first in `STATES` that anyone is in."""
        told: list[EngineStatus] = await self._call_engines(self.each, lambda _, engine: engine.status())
        memory: dict[str, int] = {}
        for status in told:
            for tag, n in status.memory.items():
                memory[tag] = memory.get(tag, 0) + n
        return EngineStatus(
            version=self._version,
            state="refusing" if self._mixed else min((s.state for s in told), key=STATES.index),
            running=sum(s.running for s in told),
            waiting=sum(s.waiting for s in told),
            parked=sum(s.parked for s in told),
            pages_free=sum(s.pages_free for s in told),
            pages_cached=sum(s.pages_cached for s in told),
            pages_total=sum(s.pages_total for s in told),
            capabilities=frozenset.intersection(*(s.capabilities for s in told)),
            root=" ".join(f"{name}={s.root}" for name, s in zip(self.each, told) if s.root),
            bytes_copied=sum(s.bytes_copied for s in told),
            memory=memory,
        )

    async def pause(self, how: Interrupt = "hold", lease: float = inf) -> None:
        await self._call_engines(self.each, lambda _, engine: engine.pause(how, lease))

    async def resume(self) -> None:
        await self._call_engines(self.each, lambda _, engine: engine.resume())

    async def sleep(self, tags: Tags) -> None:
        await self._call_engines(self.each, lambda _, engine: engine.sleep(tags))

    async def wake(self, tags: Tags) -> None:
        await self._call_engines(self.each, lambda _, engine: engine.wake(tags))

    async def receive(self, message: Message) -> int:
        """To each trained policy its part. -> the version that all of them serve."""
        if isinstance(message, Commit):
            return await self._commit_update(message)
        if isinstance(message, Begin | Abort):
            self._begun = message.manifest if isinstance(message, Begin) else None
        await self._call_engines(self.trained, lambda name, engine: engine.receive(_policy_message(message, name)))
        return self._version

    async def _commit_update(self, message: Commit) -> int:
        """One that fails while another serves the new version already would be a mixture: then nobody generates."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise SyncError("commit without begin")
        if (message.version, message.root) != (begun.version, begun.root):
            raise SyncError(
                f"version {message.version} is committed, but {begun.version} was begun, or with another root"
            )
        roots = {name: begun.policy_part(name).root for name in self.trained}
        answers = await asyncio.gather(
            *(engine.receive(Commit(message.version, roots[name])) for name, engine in self.trained.items()),
            return_exceptions=True,
        )
        faults = {name: answer for name, answer in zip(self.trained, answers) if answer != message.version}
        if faults:
            name, why = next(iter(faults.items()))
            if len(faults) < len(answers):
                self._mixed = f"'{name}' did not take version {message.version}, and others did: {why}"
            raise (
                why
                if isinstance(why, BaseException)
                else SyncError(f"'{name}' serves version {why}, not {message.version}")
            )
        self._version, self._mixed = message.version, ""
        return self._version

    async def _call_engines(self, engines: Mapping[str, Any], ask: Callable[[str, Any], Awaitable[Any]]) -> list[Any]:
        """Every answer, once all have answered; the first fault is everyone's."""
        answers = await asyncio.gather(*(ask(name, engine) for name, engine in engines.items()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


def _policy_message(message: Message, policy: str) -> Message:
    match message:
        case Begin():
            return replace(message, manifest=message.manifest.policy_part(policy))
        case Route():
            return message.data[policy]
    return message
