"""schedule -> run -> deliver, until nothing is left: what was drawn goes token by token to those who listen, and whole
at the end.

The event loop owns the bookkeeping, the device thread owns the arithmetic: between two steps nothing of the
engine runs. Steps run only while the engine serves. Whatever changes requests, pages or weights
does so between two steps, where no task runs or it yields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from rondel.core.clocks import TimeAccount
from rondel.core.errors import EngineError, LawError, UserError
from rondel.core.events import Advised, Generating, Speculated, emit
from rondel.core.types import Commit, Request
from rondel.generate.engine.builtin.lifecycle import StepTask

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.answers import AnswerDelivery, SequenceLog
    from rondel.generate.engine.builtin.decode_ahead import DecodeAhead
    from rondel.generate.engine.builtin.lifecycle import EngineLifecycle
    from rondel.generate.engine.builtin.request import SequenceState
    from rondel.generate.engine.builtin.runner import ModelRunner
    from rondel.generate.engine.builtin.scheduler import Scheduler
    from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
    from rondel.generate.engine.concurrency import ConcurrencyController

HEARTBEAT = 0.5


class ServingLoop(StepTask):
    """Steps of the token engine.

    seconds  spent in steps
    account  of the engine's time
    gone     running requests whose callers left: a step may still be computing them
    """

    def __init__(
        self,
        run: Callable[..., Awaitable[Any]],
        lifecycle: EngineLifecycle,
        scheduler: Scheduler,
        runner: ModelRunner,
        answers: AnswerDelivery,
        log: SequenceLog,
        *,
        speculation: SpeculativeDecoder | None,
        concurrency: ConcurrencyController | None,
        weights: Callable[[], Mapping[str, int]],
        ahead: DecodeAhead | None,
    ) -> None:
        """`weights`: bytes of those that are the engine's own, by name. `ahead`:
        begins steps before they are asked for."""
        self.account = TimeAccount("engine")
        super().__init__(lifecycle, self.account.switch_to)
        self.run, self.scheduler, self.runner = run, scheduler, runner
        self.answers, self.log, self.speculation, self.concurrency = answers, log, speculation, concurrency
        self.seconds, self._weights, self.ahead = 0.0, weights, ahead
        self._retracted = 0  # of the scheduler, when the account was told last
        self.gone: list[SequenceState] = []
        self._aborted: list[SequenceState] = []  # and those that shall return what they have
        if runner.eyes.encoder is not None:
            runner.eyes.encoder.wake = self.wake_up

    @property
    def is_busy(self) -> bool:
        return self._task is not None and self.scheduler.has_work

    @property
    def _may_step(self) -> bool:
        everyone = chain(self.scheduler.running, self.scheduler.waiting)
        return (
            self.lifecycle.state == "serving"
            and (self.lifecycle.admits or self.scheduler.has_begun)
            and any(not live.stands_still(self.lifecycle.version) for live in everyone)
        )

    @property
    def _has_begun_ahead(self) -> bool:
        return self.ahead is not None and self.ahead.plan is not None

    async def _step_until_done(self) -> None:
        """Step until nothing is left or a pause arrives."""
        began = told = time.perf_counter()
        tokens = 0
        try:
            await self._wait_for_arrivals()
            self._let_go()
            while self._may_step or self._has_begun_ahead:
                if (drawn := await self._run_step()) is None:
                    break
                tokens += drawn
                if (now := time.perf_counter()) - told > HEARTBEAT:
                    emit(Generating(len(self.scheduler.running), len(self.scheduler.waiting), tokens, now - began))
                    told = now
                await asyncio.sleep(0)
                self._let_go()
        except BaseException as error:
            self._fail_all(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.seconds += time.perf_counter() - began
            self._task = None
            self.update_account()
            self._let_go()
            if self.speculation is not None and (guessed := self.speculation.take_new_counts())[0]:
                emit(Speculated(*guessed))

    async def wait_until_stopped(self) -> None:
        """While it drains, half written answers go on as soon as their pictures are encoded."""
        await super().wait_until_stopped()
        s = self.scheduler
        while (encoder := self.runner.eyes.encoder) is not None and not self.lifecycle.admits:
            begun = [*s.running, *(live for live in s.waiting if live.written)]
            if not await encoder.wait_for(live.gaze.ahead for live in begun if live.gaze is not None):
                return
            await super().wait_until_stopped()

    async def _run_step(self) -> int | None:
        """-> how many tokens were drawn; None: nothing can be computed before pictures of those who run are encoded."""
        scheduler, version = self.scheduler, self.lifecycle.version
        started, retracted = time.perf_counter(), scheduler.retracted
        plan = begun = self.ahead.take_plan() if self.ahead is not None else None
        if plan is None:
            if (encoder := self.runner.eyes.encoder) is not None:
                encoder.ask_ahead(live.gaze.ahead for live in scheduler.waiting if live.gaze is not None)
            plan = scheduler.plan_step(version, fresh=self.lifecycle.admits)
        felt = bool(scheduler.waiting) and len(scheduler.running) >= scheduler.limit
        if begun is None and not plan.tokens:
            if any(live.gaze is not None and live.stands_still(version) for live in scheduler.running):
                return None
            raise LawError(
                f"a step without tokens: {len(scheduler.running)} requests run, {len(scheduler.waiting)} wait, "
                f"{scheduler.caches.page_counts['free']} pages are free"
            )
        if self.speculation is not None:
            self.speculation.propose_drafts(plan, scheduler)
        following = self.ahead.plan_after(plan) if self.ahead is not None and self._may_step else None
        began = time.perf_counter()
        drawn = await self.run(self.runner.step, plan, following)
        if begun is not None:  # whoever ended in the step before it has drawn nothing here
            drawn = [each for each in drawn if each[0].row >= 0]
        version = self.lifecycle.version
        self.log.record_step(drawn, version)
        if self.speculation is not None:
            self.speculation.record_step(plan, drawn, time.perf_counter() - began)
        scheduler.mark_computed(plan)
        for live, token, logprob in drawn:
            if live.row >= 0:  # else a token before this one ended it: the rest of its round was never written
                self.answers.deliver_token(live, token, logprob, version)
        if following is None:
            scheduler.roll_back(plan)
        scheduler.follow_lines(version)
        self._let_go()
        scheduler.check_invariants()
        requests, read = len(plan.chunks) + len(plan.decoding), sum(n for _, n in plan.chunks)
        for name, n in (("steps", 1), ("tokens", len(drawn)), ("requests", requests), ("read", read)):
            self.account.counts[name] += n
        if self.concurrency is not None:
            pressed = scheduler.retracted > retracted
            self.concurrency.record_answer(len(drawn), time.perf_counter() - started, felt=felt, pressed=pressed)
            scheduler.limit = self.concurrency.limit
        return len(drawn)

    async def _wait_for_arrivals(self) -> None:
        """Let everyone who is about to ask, ask: the first batch then does not depend on the order of wake-ups."""
        seen = -1
        while seen != len(self.scheduler.waiting):
            seen = len(self.scheduler.waiting)
            for _ in range(4):
                await asyncio.sleep(0)

    # -- an update of the weights ------------------------------------------------------------------

    def follow_weights(self, before: int, commit: Commit) -> None:
        if commit.version <= before:  # other weights under a name that was used: nothing computed so far may be matched
            self.scheduler.drop_cache(before)
        if self.runner.loaded.sight is not None:
            self.runner.eyes.forget_features()
        self.scheduler.new_version(commit.version, before)
        self.log.record_version(commit.version, commit.root)
        if self.runner.draft is not None:
            self.runner.draft.forget_cache()  # it learns with the policy

    def report_version(self) -> None:
        if steps := self.account.counts["steps"]:
            self.account.counts["room"] = steps * self.scheduler.max_running
            self.account.counts["retracted"] = self.scheduler.retracted - self._retracted
            self._retracted = self.scheduler.retracted
        own = {f"engine {name}": n for name, n in self._weights().items()}
        self.account.report_time({"kv_cache": self.runner.cache_bytes, **own})
        if self.concurrency is not None and (found := self.concurrency.settled_limit()):
            emit(Advised(self.lifecycle.version, *found))

    # -- requests that end otherwise than by their last token --------------------------------------

    def remove_request(self, live: SequenceState) -> None:
        """Its caller is gone. The device thread may be reading it, so a running request leaves between two steps."""
        if self._task is not None and live in self.scheduler.running:
            self.gone.append(live)
        else:
            self.scheduler.release_sequence(live, self.lifecycle.version)

    def abort_requests(self, which: Callable[[Request], bool]) -> int:
        """Those of which this is true return what they have written, between two steps. -> how many there are."""
        found = [live for live in [*self.scheduler.running, *self.scheduler.waiting] if which(live.request)]
        self._aborted += found
        if self._task is None:
            self._let_go()
        return len(found)

    def _let_go(self) -> None:
        version = self.lifecycle.version
        for live in self.gone:
            self.scheduler.release_sequence(live, version)
        for live in self._aborted:
            if live in self.scheduler.running or live in self.scheduler.waiting:
                self.answers.finish_sequence(live, "abort", version)
        self.gone.clear()
        self._aborted.clear()

    def _fail_all(self, error: BaseException) -> None:
        """A step broke: everyone learns why, nothing half-computed stays in the cache, and
        the engine refuses until a good update.
        """
        self.lifecycle.broken = f"its step broke: {type(error).__name__}: {error}"
        if self.ahead is not None:
            self.ahead.plan = None
            self.runner.forget_ahead()
        self.scheduler.drop_cache(self.lifecycle.version)
        self.gone.clear()
        self._aborted.clear()
        for live in self.scheduler.waiting:
            live.finish(
                error
                if isinstance(error, UserError)
                else EngineError(f"the engine's step broke: {type(error).__name__}: {error}")
            )
        self.scheduler.waiting.clear()
