"""The built-in engine: one device, one module shared with the trainer. schedule ->
run -> deliver, until nothing is left.

The event loop owns the bookkeeping, the device thread owns the arithmetic: between
two steps nothing of the engine runs.

    serving ──pause──> held ──sleep──> asleep        a failed update or step: refusing, until a good update

Steps run only while serving. Whatever changes requests, pages or weights does so between
two steps, where `_pump` is None or yields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from rondel.core.errors import EngineError, LawError, SyncError, UserError
from rondel.core.events import Advised, Generating, Speculated, Warned, emit, stalled_error
from rondel.core.protocols import Interrupt, MemoryClaim, Tags, Transport
from rondel.core.time_account import TimeAccount
from rondel.core.types import (
    Abort,
    Begin,
    Commit,
    Completion,
    EngineStatus,
    FinishReason,
    Message,
    Request,
    Route,
    TokenScores,
)
from rondel.generate.engine.builtin.channels import open_channels
from rondel.generate.engine.builtin.grammar import GrammarCache
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.pages import LayerPools, PageAllocator
from rondel.generate.engine.builtin.request import Heard, SequenceState
from rondel.generate.engine.builtin.runner import ModelRunner
from rondel.generate.engine.builtin.scheduler import Scheduler
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.generate.engine.builtin.text import open_reader, split_stops
from rondel.generate.engine.builtin.vision_encoder import RequestImages
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.generate.engine.concurrency import ConcurrencyController
from rondel.models import linear

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.draft import DraftModel
    from rondel.models.compilation import CompiledModel
    from rondel.models.cuda_graphs import DecodeGraphs
    from rondel.models.loaded_model import LoadedModel
    from rondel.runtime.journal.wal import Drawn, Routes, TokenLog

HEARTBEAT = 0.5
CAN = ("logprobs", "hold", "drain", "abort", "score")


class BuiltinEngine:
    """The Engine protocol over `LoadedModel`. `run` executes a function on the device's own thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        run: Callable[..., Awaitable[Any]],
        kv_pages: int,
        max_running: int = 64,
        prefill_tokens: int = 2048,
        version: int = 0,
        routes: bool = False,
        speculation: SpeculativeDecoder | None = None,
        compiled: CompiledModel | DecodeGraphs | None = None,
        transports: Mapping[str, Transport] | None = None,
        log: TokenLog | None = None,
        concurrency: ConcurrencyController | None = None,
        claim: MemoryClaim | None = None,
    ) -> None:
        """`concurrency`: who finds out how many of max_running should work together; without one all may.

        `claim`: on the memory of a device that a trainer wants, too; without one there is nobody to ask.
        """
        self.loaded, self._run, self.claim = loaded, run, claim
        self.arrivals = WeightReceiver(loaded, transports or {})
        self.pages = PageAllocator(kv_pages)
        self.scheduler = Scheduler(self.pages, max_running=max_running, prefill_tokens=prefill_tokens)
        self.concurrency = concurrency
        if concurrency is not None:
            self.scheduler.limit = concurrency.limit
        self.speculation = speculation
        if speculation is not None:
            speculation.attach_model(loaded, kv_pages)
        draft = speculation.draft if speculation else None
        self.runner = ModelRunner(loaded, self.pages, max_running, records=routes, draft=draft, compiled=compiled)
        self.resting = MemoryRelease(loaded, compiled, owns=bool(transports))
        self.grammars = GrammarCache(loaded)
        self.log = log
        self.version = version
        self.seconds = 0.0  # spent in steps
        self.account, self._retracted = TimeAccount("engine"), 0
        self._held = False
        self._asleep: set[str] = set()  # memory tags given back
        self._broken = ""  # why it refuses
        self._admits = True  # False while it drains
        self._gone: list[SequenceState] = []  # running requests whose callers left: a step may still be computing them
        self._aborted: list[SequenceState] = []  # and those that shall return what they have
        self._pump: asyncio.Task | None = None
        self._lease: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        if self._broken:
            return "refusing"
        if self._asleep:
            return "asleep"
        return "held" if self._held or self.arrivals.is_overwriting else "serving"

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request, *, on_token: Heard | None = None) -> Completion:
        """`on_token` is told of every token as it is drawn, for streams."""
        self._refuse_if_broken()
        self._check_request(request)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def resolve_future(result: Completion | Exception) -> None:
            if not done.done():
                done.set_result(result) if isinstance(result, Completion) else done.set_exception(result)

        live = SequenceState(
            request,
            resolve_future,
            list(request.tokens),
            len(request.tokens),
            heard=on_token,
            gaze=RequestImages.from_request(request),
        )
        await self._prepare_sampling(live)
        if live.mark and (reason := self._restore_logged_tokens(live)):
            return self._build_completion(live, reason)
        self.scheduler.waiting.append(live)
        self.scheduler.follow_schedule(self.version)
        self._wake_pump()
        try:
            async with asyncio.timeout(request.deadline):
                return await done
        except TimeoutError as error:
            raise stalled_error(
                f"a request waits for the engine since {request.deadline} s; it had written {live.written} tokens, "
                f"engine {self.state}"
            ) from error
        finally:
            if done.cancelled():  # the caller went away
                self._remove_request(live)

    async def _prepare_sampling(self, live: SequenceState) -> None:
        """What its sampling needs beside the logits. A grammar is compiled on the device's thread, where it is used."""
        request, own = live.request, live.tokens[live.prompt - live.request.continuation :]
        ids, strings = split_stops(self.loaded.tokenizer, request.sampling.stop)
        live.ends = ids if request.sampling.ignore_eos else ids | self.loaded.stop_ids
        live.reader = open_reader(self.loaded.tokenizer, strings, own) if strings else None
        live.channels = open_channels(request.wants - {"experts"}, self.loaded.head.weight.shape[0])
        if request.sampling.grammar is not None:
            live.constraint = await self._run(self.grammars.start_constraint, request.sampling.grammar, own)
            self._refuse_if_broken()
        elif self.log is not None and request.key and not request.namespace and not request.wants - {"experts"}:
            live.mark = self.log.context_hash(live.cache_keys[: live.prompt - request.continuation])

    def _restore_logged_tokens(self, live: SequenceState) -> FinishReason | None:
        """The tokens that this sample had drawn before a crash, and their routes if it wants
        them. -> why it needs no more, if so.
        """
        assert self.log is not None
        pieces: list[np.ndarray] = []
        reason = None
        for found in self.log.recall_tokens(live.request.key, live.mark, first=live.request.continuation):
            if "experts" in live.request.wants:
                if found.routes is None or found.routes[0] > live.logged:
                    break  # it was drawn when nobody wanted them
                # the first of a continued piece tells those before it once more: the earliest stay
                first, routes = found.routes
                pieces.append(routes[live.logged - first :])
                live.logged = max(live.logged, first + len(routes))
            live.restore_token(found.token, found.logprob, found.version)
            if reason := live.check_finish():
                break
        if pieces:
            live.routes = np.concatenate(pieces).astype(np.int16)
        return reason

    async def score(self, request: Request) -> TokenScores:
        self._refuse_if_broken()
        if self.arrivals.is_overwriting:
            raise EngineError("new weights are arriving: score before the update begins or after its commit")
        if "weights" in self._asleep:
            raise EngineError("the weights are asleep: wake them before anything is scored")
        if request.wants:
            raise UserError(f"score gives log-probabilities and nothing else, not {', '.join(sorted(request.wants))}")
        if not 1 <= len(request.tokens) <= self.loaded.max_context:
            raise UserError(
                f"{len(request.tokens)} tokens cannot be scored; this model carries 1 to {self.loaded.max_context}"
            )
        self._check_words(request)
        version = self.version
        self.account.switch_to("generate" if self._pump is not None else "score")
        try:
            return TokenScores(
                await self._run(self.runner.score, request.tokens, RequestImages.from_request(request)), version
            )
        finally:
            self.account.switch_to(self._current_activity)

    def _check_request(self, request: Request) -> None:
        prompt, new = len(request.tokens), request.sampling.max_tokens
        if not prompt:
            raise UserError("an empty prompt: a language model needs at least one token to go on from")
        if prompt + new > self.loaded.max_context:
            raise UserError(
                f"{prompt} prompt tokens + max_tokens {new} exceed the model's context of {self.loaded.max_context}: "
                "shorten the prompt or lower max_tokens"
            )
        if prompt + new > self.pages.count:
            raise UserError(
                f"{prompt} prompt tokens + max_tokens {new} do not fit into {self.pages.count} cache pages: raise "
                f"engine.kv_pages"
            )
        self._check_words(request)

    def _check_words(self, request: Request) -> None:
        """A token that does not exist would break the step of everyone; a wish that nobody reads would be a lie."""
        vocab = self.loaded.model.get_input_embeddings().weight.shape[0]
        named = [*request.sampling.logit_bias, *(s for s in request.sampling.stop if isinstance(s, int))]
        if strange := [t for t in named if not 0 <= t < vocab]:
            raise UserError(f"logit_bias or stop names token {strange[0]}: this model's tokens are 0 to {vocab - 1}")
        if strange := [t for t in request.tokens if not 0 <= t < vocab]:
            raise UserError(
                f"token {strange[0]} does not exist: this model's tokens are 0 to {vocab - 1}. Was the prompt made by "
                f"another tokenizer?"
            )
        if request.media:
            self.runner.eyes.check_request(request)
            if self._draft_model is not None:
                raise UserError(
                    "images beside a draft model, which reads text alone: set engine.speculative.kind to 'ngram' or "
                    "'off'"
                )
        if request.adapter:
            raise UserError(f"the built-in engine has no adapter '{request.adapter}'")
        if "experts" in request.wants and not self.runner.records:
            why = "it was made without routes=True" if self.loaded.routers else "this model is dense"
            raise UserError(f"the engine records no routed experts: {why}")
        open_channels(request.wants - {"experts"}, vocab)

    # -- the pump --------------------------------------------------------------------------------

    @property
    def _current_activity(self) -> str:
        """For its account: `held` is a wait for the trainer or an update, `idle` one for whoever asks."""
        return "generate" if self._pump is not None else {"serving": "idle"}.get(self.state, self.state)

    @property
    def _may_step(self) -> bool:
        return (
            self.state == "serving"
            and (self._admits or self.scheduler.has_begun)
            and self.scheduler.may_move(self.version)
        )

    @property
    def _has_work(self) -> bool:
        """Whether a step runs or will: parked requests do not count (law 8)."""
        return self._pump is not None and self.scheduler.has_work

    def _wake_pump(self) -> None:
        if self._pump is None and self._may_step:
            self._pump = asyncio.create_task(self._step_loop(), name="engine")
        self.account.switch_to(self._current_activity)

    async def _step_loop(self) -> None:
        """Step until nothing is left or a pause arrives."""
        began = told = time.perf_counter()
        tokens = 0
        try:
            await self._wait_for_arrivals()
            while self._may_step:
                tokens += await self._run_step()
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
            self._pump = None
            self.account.switch_to(self._current_activity)
            self._let_go()
            if self.speculation is not None and (guessed := self.speculation.take_new_counts())[0]:
                emit(Speculated(*guessed))

    async def _run_step(self) -> int:
        """-> how many tokens were drawn."""
        started, retracted = time.perf_counter(), self.scheduler.retracted
        plan = self.scheduler.plan_step(self.version, fresh=self._admits)
        felt = bool(self.scheduler.waiting) and len(self.scheduler.running) >= self.scheduler.limit
        if not plan.tokens:
            raise LawError(
                f"a step without tokens: {len(self.scheduler.running)} requests run, {len(self.scheduler.waiting)} "
                f"wait, "
                f"{self.pages.free_count} pages are free"
            )
        if self.speculation is not None:
            self.speculation.propose_drafts(plan, self.scheduler)
        began = time.perf_counter()
        drawn = await self._run(self.runner.step, plan)
        if self.log is not None:
            self._log_tokens(drawn)
        if self.speculation is not None:
            self.speculation.record_step(plan, drawn, time.perf_counter() - began)
        self.scheduler.mark_computed(plan)
        for live, token, logprob in drawn:
            if live.row >= 0:  # else a token before this one ended it: the rest of its round was never written
                self._deliver_token(live, token, logprob)
        self.scheduler.roll_back(plan)
        self.scheduler.follow_schedule(self.version)
        self._let_go()
        self.scheduler.check_invariants()
        requests, read = len(plan.chunks) + len(plan.decoding), sum(n for _, n in plan.chunks)
        for name, n in (("steps", 1), ("tokens", len(drawn)), ("requests", requests), ("read", read)):
            self.account.counts[name] += n
        if self.concurrency is not None:
            pressed = self.scheduler.retracted > retracted
            self.concurrency.record_answer(len(drawn), time.perf_counter() - started, felt=felt, pressed=pressed)
            self.scheduler.limit = self.concurrency.limit
        return len(drawn)

    def _log_tokens(self, drawn: list[tuple[SequenceState, int, float]]) -> None:
        """All tokens of the step, before anyone sees one. Guesses that are drawn behind an
        end are passed over when they are read.
        """
        assert self.log is not None
        more: dict[SequenceState, int] = {}
        rows: list[Drawn] = []
        routes: list[Routes | None] = []
        for live, token, logprob in drawn:
            if live.mark and live.fault is None:
                more[live] = nth = more.get(live, -1) + 1
                rows.append((live.request.key, live.noise_counter + nth, live.mark, logprob, token, self.version))
                routes.append(self._routes_of(live, live.computed_tokens + nth))
        self.log.write(rows, routes)

    def _routes_of(self, live: SequenceState, upto: int) -> Routes | None:
        """Of what was computed of it since the last token that was logged."""
        if "experts" not in live.request.wants or self.pages.routes is None:
            return None
        first, live.logged = live.logged, upto
        return first, live.routes_from(first, upto, self.pages.routes)

    async def _wait_for_arrivals(self) -> None:
        """Let everyone who is about to ask, ask: the first batch then does not depend on the order of wake-ups."""
        seen = -1
        while seen != len(self.scheduler.waiting):
            seen = len(self.scheduler.waiting)
            for _ in range(4):
                await asyncio.sleep(0)

    def _deliver_token(self, live: SequenceState, token: int, logprob: float) -> None:
        if live.fault is not None:
            self.scheduler.release_sequence(live, self.version)
            return live.finish(live.fault)
        live.first = live.first or time.perf_counter()
        live.append_token(token, logprob, self.version)
        reason = live.check_finish()
        if live.heard is not None:
            top = live.channels.top_logprobs if live.channels is not None else None
            try:
                live.heard(token, logprob, self.version, top[-1] if top else None)
            except Exception as error:  # a listener that raises ends its own request, not the step of everyone
                live.finish(EngineError(f"what listens to the tokens broke: {type(error).__name__}: {error}"))
                reason = "abort"
        if reason:
            self._finish_sequence(live, reason)

    def _finish_sequence(self, live: SequenceState, reason: FinishReason) -> None:
        live.keep_routes(self.pages.routes)
        live.append_version_span(self.version)
        completion = self._build_completion(live, reason)
        self.scheduler.release_sequence(live, self.version)
        live.finish(completion)

    def _build_completion(self, live: SequenceState, reason: FinishReason) -> Completion:
        completion = live.to_completion(reason)
        if "experts" in live.request.wants:
            completion.experts = live.routes
        decode = self.loaded.tokenizer.decode
        completion.text = live.said if live.said is not None else decode(completion.tokens, skip_special_tokens=True)
        return completion

    def _remove_request(self, live: SequenceState) -> None:
        """Its caller is gone. The device thread may be reading it, so a running request leaves between two steps."""
        if self._pump is not None and live in self.scheduler.running:
            self._gone.append(live)
        else:
            self.scheduler.release_sequence(live, self.version)

    def _let_go(self) -> None:
        for live in self._gone:
            self.scheduler.release_sequence(live, self.version)
        for live in self._aborted:
            if live in self.scheduler.running or live in self.scheduler.waiting:
                self._finish_sequence(live, "abort")
        self._gone.clear()
        self._aborted.clear()

    def _fail_all(self, error: BaseException) -> None:
        """A step broke: everyone learns why, nothing half-computed stays in the cache, and
        the engine refuses until a good update.
        """
        self._broken = f"its step broke: {type(error).__name__}: {error}"
        self.scheduler.drop_cache(self.version)
        self._gone.clear()
        self._aborted.clear()
        for live in self.scheduler.waiting:
            live.finish(
                error
                if isinstance(error, UserError)
                else EngineError(f"the engine's step broke: {type(error).__name__}: {error}")
            )
        self.scheduler.waiting.clear()

    # -- control ---------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        s = self.scheduler
        parked = len(s.running) + len(s.waiting) if self.state != "serving" else 0
        return EngineStatus(
            version=self.version,
            state=self.state,
            running=0 if parked else len(s.running),
            waiting=0 if parked else len(s.waiting),
            parked=parked,
            pages_free=self.pages.free_count,
            pages_cached=s.tree.cached,
            pages_total=self.pages.count,
            capabilities=frozenset(
                {
                    *CAN,
                    *(f"update_{kind}" for kind in self.arrivals.route_kinds),
                    *(["images"] if self.loaded.sight else []),
                }
            ),
            root=self.arrivals.root,
            bytes_copied=self.arrivals.bytes_copied,
            memory={"kv_cache": sum(layers.pool_bytes for layers in self._page_pools), **self.resting.memory_bytes},
        )

    @property
    def _page_pools(self) -> list[LayerPools]:
        draft = self._draft_model
        return [self.pages.keys, self.pages.values, *([draft.keys, draft.values] if draft else [])]

    @property
    def _draft_model(self) -> DraftModel | None:
        return self.speculation.draft if self.speculation else None

    async def pause(self, how: Interrupt = "hold", lease: float = float("inf")) -> None:
        """hold: park requests between two steps, caches kept. drain: let the begun ones
        end. abort: return what is written.

        Those of a replayed run are first brought to their lines.
        """
        if how not in get_args(Interrupt):
            raise UserError(f"pause('{how}'): it is one of {', '.join(get_args(Interrupt))}")
        self._end_lease()
        while self.state == "serving" and self.scheduler.makes_for_a_line(self.version):
            self._wake_pump()
            if self._pump is None:  # nobody may move; whoever is not at its line is named when the weights change
                break
            await asyncio.wait([self._pump])
        self._held = self._held or how != "drain"
        self._admits = how != "drain"
        try:
            while self._pump is not None:
                # unlike `await self._pump`, this leaves the step alone if the caller gives up
                await asyncio.wait([self._pump])
            self._held = True
        finally:
            self._admits = True
            self._wake_pump()
            self.account.switch_to(self._current_activity)
        if how == "abort":
            for live in [*self.scheduler.running, *self.scheduler.waiting]:
                self._finish_sequence(live, "abort")
        if lease != float("inf"):
            self._lease = asyncio.get_running_loop().call_later(lease, self._lease_ended, lease)

    async def resume(self) -> None:
        self._end_lease()
        self._held = False
        self._wake_pump()

    async def abort(self, which: Callable[[Request], bool]) -> int:
        """Requests of which this is true return what they have written, between two steps. -> how many there are."""
        found = [live for live in [*self.scheduler.running, *self.scheduler.waiting] if which(live.request)]
        self._aborted += found
        if self._pump is None:
            self._let_go()
        return len(found)

    async def flush_cache(self) -> int:
        """Forget every cached prefix; parked requests keep their tokens and compute their
        context again. -> pages that became free.
        """
        if self._has_work:
            raise EngineError("flush while requests run: pause the engine first, or wait until it is idle")
        free = self.pages.free_count
        self.scheduler.drop_cache(self.version)
        self.runner.eyes.forget_features()
        return self.pages.free_count - free

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None

    def _lease_ended(self, lease: float) -> None:
        self._lease, self._held = None, False
        emit(
            Warned(
                f"the engine was paused for {lease:g} s and nobody resumed it; it is {self.state} again at version "
                f"{self.version}"
            )
        )
        self._wake_pump()

    async def sleep(self, tags: Tags) -> None:
        """Give memory back by tag. Parked requests keep their tokens; without their
        cache they compute it again (law 8).
        """
        if not tags:
            return
        if self._has_work:
            raise EngineError("sleep while requests run: pause the engine first")
        if "kv_cache" in tags:
            self.scheduler.drop_cache(self.version)
            self.pages.release_memory()
            self.runner.eyes.forget_features()
            if self.speculation is not None and self.speculation.draft is not None:
                self.speculation.draft.release_memory()
            if self.claim is not None:
                self.claim.leave("engine")
        await self._run(self.resting.sleep, tags)
        self._asleep.update(tags)
        self.account.switch_to(self._current_activity)

    async def wake(self, tags: Tags) -> None:
        """Awake when every tag is back."""
        if "kv_cache" in tags and self.claim is not None:
            self.claim.take("engine")
        await self._run(self.resting.wake, tags)
        self._asleep.difference_update(tags)
        self._wake_pump()

    # -- weights ---------------------------------------------------------------------------------

    async def receive(self, message: Message) -> int:
        """begin -> route -> commit, or abort. -> the version served.

        Data beside the weights that serve: whatever fails before the commit leaves the old
        version serving, and requests run until then. Data over them: requests are parked first, and if
        anything fails, the engine refuses until a good update.
        """
        beside = (
            message.beside
            if isinstance(message, Begin)
            else isinstance(message, Route) and not self.arrivals.is_overwriting
        )
        if self._has_work and not beside and not isinstance(message, Abort):
            raise SyncError("weights arrived while requests run: pause the engine first")
        try:
            match message:
                case Begin():
                    self.arrivals.begin_update(message, self.version)
                    self.account.switch_to(self._current_activity)
                case Route():
                    await self.arrivals.receive_data(message, self._run)
                case Commit():
                    await self._commit_update(message)
                    self._tell_account()
                case Abort(reason=reason) if not self.arrivals.drop_update():
                    self._broken = f"the update was aborted ({reason})"
        except BaseException as error:
            why = str(error) or type(error).__name__
            if not (whole := self.arrivals.drop_update()):
                self._broken = why
            if not isinstance(error, Exception):
                raise
            raise SyncError(why if whole else f"{why}; the engine refuses to generate until a good update") from error
        return self.version

    async def _commit_update(self, commit: Commit) -> None:
        await self._run(self.arrivals.commit_update, commit)
        if commit.version <= self.version:
            # other weights under a name that was used: nothing computed so far may be matched
            self.scheduler.drop_cache(self.version)
        linear.weights_changed()
        self.runner.eyes.forget_features()
        before, self.version = self.version, commit.version
        self.scheduler.new_version(self.version, before)
        if self.log is not None:
            self.log.record_version(self.version, commit.root)
        if self.speculation is not None and self.speculation.draft is not None:
            self.speculation.draft.forget_cache()  # it learns with the policy
        self._broken = ""
        self._wake_pump()

    def _tell_account(self) -> None:
        """Once a version: `requests` of `room` were decoded together."""
        if steps := self.account.counts["steps"]:
            self.account.counts["room"] = steps * self.scheduler.max_running
            self.account.counts["retracted"] = self.scheduler.retracted - self._retracted
            self._retracted = self.scheduler.retracted
        self.account.report_time({"kv_cache": sum(layers.pool_bytes for layers in self._page_pools)})
        if self.concurrency is not None and (found := self.concurrency.settled_limit()):
            emit(Advised(self.version, *found))

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise EngineError(f"the engine refuses to generate until a good update: {self._broken}")
