"""An engine that answers in steps: all requests in flight take their next one together, in one pass of the model.

Noise is counter-based, so when a step is taken does not change what it draws. A parked request keeps what it has drawn;
an engine may cache what its answers read, and forgets it with the weights.

generate ──> answers ──_step──> the device's thread ──> log ──> completions
receive  ──> EngineUpdate ──> weight receiver
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from rondel.core.clocks import TimeAccount
from rondel.core.errors import EngineError, UserError
from rondel.core.events import stalled_error
from rondel.core.protocols import Transport
from rondel.core.types import Commit, Completion, EngineStatus, Message, Request, TokenScores
from rondel.generate.engine.builtin.lifecycle import EngineLifecycle, EngineUpdate
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.generate.engine.stepwise.answer import OnToken
from rondel.generate.engine.stepwise.answer_log import AnswerLog
from rondel.generate.engine.stepwise.control import A, StepwiseControl

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.runtime.journal.wal import TokenLog

CAN = ("logprobs", "hold", "drain", "abort", "score")


class StepwiseEngine(StepwiseControl[A]):
    """The Engine protocol over a `LoadedModel`; what a step draws is its subclass's. `run` executes a function on the
    device's own thread.
    """

    log_kind: type[AnswerLog[Any]]

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        run: Callable[..., Awaitable[Any]],
        max_running: int = 64,
        version: int = 0,
        transports: Mapping[str, Transport] | None = None,
        log: TokenLog | None = None,
    ) -> None:
        self.loaded, self.run, self.max_running = loaded, run, max_running
        self.arrivals = WeightReceiver(loaded, transports or {})
        self.account = TimeAccount("engine")
        super().__init__(EngineLifecycle(version, lambda: self.arrivals.is_overwriting), self.account.switch_to)
        self.log = self.log_kind(log)
        self.answers: list[A] = []
        self.update = EngineUpdate(self.arrivals, self.lifecycle, self)

    @abstractmethod
    def open_answer(self, request: Request, done: asyncio.Future[Completion]) -> A:
        """Of which nothing is drawn yet. UserError where it cannot be drawn."""

    @abstractmethod
    def draw_step(self, answers: list[A]) -> list[Any]:
        """On the device's thread: the next step of each."""

    @abstractmethod
    def keep_step(self, answers: list[A], steps: list[Any], version: int) -> int:
        """What was drawn becomes a part of the answers, and of the log before anyone sees it. -> how many tokens"""

    @abstractmethod
    def score_tokens(self, tokens: list[int]) -> list[float]:
        """On the device's thread: what both sides of a weight update must agree on, for each token."""

    def forget_weights(self) -> None:
        """Nothing that was computed with earlier weights is used again."""

    @property
    def cache_bytes(self) -> int:
        """Of keys and values that it holds."""
        return 0

    @property
    def context_limit(self) -> int:
        """Tokens that a prompt and its answer can have together."""
        return self.loaded.max_context

    @property
    def version(self) -> int:
        return self.lifecycle.version

    @version.setter
    def version(self, version: int) -> None:
        self.lifecycle.version = version

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request, *, on_token: OnToken | None = None) -> Completion:
        """`on_token` is told of every token of a text as soon as it is certain, for streams."""
        self.lifecycle.refuse_if_broken()
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        answer = self.open_answer(request, done)
        answer.on_token = on_token
        self.log.restore(answer)
        answer.follow_lines(self.version)
        if answer.is_whole:
            answer.finish("stop", self.version)
            return await done
        self.answers.append(answer)
        self.wake_up()
        try:
            async with asyncio.timeout(request.deadline):
                return await done
        except TimeoutError as error:
            raise stalled_error(
                f"a request waits for the engine since {request.deadline} s; it had drawn {answer.drawn}, engine "
                f"{self.lifecycle.state}"
            ) from error
        finally:
            if answer in self.answers:  # the caller went away
                self.answers.remove(answer)

    async def flush_cache(self) -> int:
        """Forget what was computed of prompts and answers, which is computed again. -> pages that became free: none are
        counted.
        """
        if self.is_busy:
            raise EngineError("flush while requests run: pause the engine first, or wait until it is idle")
        self.forget_weights()
        return 0

    async def score(self, request: Request) -> TokenScores:
        self.lifecycle.refuse_if_broken()
        if self.arrivals.is_overwriting:
            raise EngineError("new weights are arriving: score before the update begins or after its commit")
        return TokenScores(await self.run(self.score_tokens, list(request.tokens)), self.version)

    # -- steps -----------------------------------------------------------------------------------

    @property
    def _may_step(self) -> bool:
        return self.lifecycle.state == "serving" and any(self._is_due(own) for own in self.answers)

    def _is_due(self, own: A) -> bool:
        """Whether it takes part in the next step."""
        return (self.lifecycle.admits or own.is_begun) and not own.stands_still(self.version)

    async def _step_until_done(self) -> None:
        try:
            for _ in range(4):  # whoever is about to ask, asks: the passes are fewer
                await asyncio.sleep(0)
            while self._may_step:
                now = [own for own in self.answers if self._is_due(own)][: self.max_running]
                version = self.version
                tokens = self.keep_step(now, await self.run(self.draw_step, now), version)
                for answer in now:
                    if answer.is_whole:
                        self.answers = [other for other in self.answers if other is not answer]
                        answer.finish("stop", version)
                for name, n in (("steps", 1), ("tokens", tokens), ("requests", len(now))):
                    self.account.counts[name] += n
                await asyncio.sleep(0)
        except BaseException as error:
            self.lifecycle.broken = f"its step broke: {type(error).__name__}: {error}"
            for answer in self.answers:
                answer.fail(error if isinstance(error, UserError) else EngineError(self.lifecycle.broken))
            self.answers.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self._task = None
            self.update_account()

    # -- control ---------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        state = self.lifecycle.state
        parked = len(self.answers) if state != "serving" else 0
        kinds = (f"update_{kind}" for kind in self.arrivals.route_kinds)
        return EngineStatus(
            version=self.version,
            state=state,
            running=len(self.answers) - parked,
            waiting=0,
            parked=parked,
            pages_free=0,
            pages_cached=0,
            pages_total=0,
            capabilities=frozenset({*CAN, *kinds}),
            root=self.arrivals.root,
            bytes_copied=self.arrivals.bytes_copied,
            memory={"kv_cache": self.cache_bytes},
        )

    async def receive(self, message: Message) -> int:
        """begin -> route -> commit, or abort. -> the version served."""
        await self.update.receive(message)
        return self.version

    def follow_weights(self, before: int, commit: Commit) -> None:
        self.forget_weights()
        for answer in self.answers:
            answer.append_version_span(before)
            answer.follow_lines(commit.version)
        self.log.record_version(commit.version, commit.root)

    def report_version(self) -> None:
        if steps := self.account.counts["steps"]:
            self.account.counts["room"] = steps * self.max_running
        self.account.report_time({"kv_cache": self.cache_bytes})
