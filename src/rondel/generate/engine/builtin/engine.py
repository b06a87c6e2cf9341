"""The built-in engine: one device and one module shared with the trainer, or the first of several processes.

generate ──> scheduler ──plan──> serving loop ──step──> runner (the device's thread)
                 ^                   └──drawn──> answer delivery ──> completions
receive  ──> engine update ──> weight receiver
pause, sleep, resume, wake ──> lifecycle: who may step
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from rondel.core.errors import EngineError
from rondel.core.events import stalled_error
from rondel.core.protocols import Interrupt, MemoryClaim, Progress, Tags, Transport
from rondel.core.types import Completion, EngineStatus, Message, Request, TokenScores
from rondel.generate.engine.builtin.answers import AnswerDelivery, RequestValidator, SequenceLog, written_so_far
from rondel.generate.engine.builtin.channels import open_channels
from rondel.generate.engine.builtin.decode_ahead import DecodeAhead
from rondel.generate.engine.builtin.grammar import GrammarCache
from rondel.generate.engine.builtin.lifecycle import EngineLifecycle, EngineUpdate, check_interrupt
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.pages import PageAllocator
from rondel.generate.engine.builtin.request import Heard, SequenceState
from rondel.generate.engine.builtin.runner import ModelRunner
from rondel.generate.engine.builtin.scheduler import Scheduler
from rondel.generate.engine.builtin.serving_loop import ServingLoop
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.generate.engine.builtin.states import SequenceStates
from rondel.generate.engine.builtin.text import open_reader, split_stops
from rondel.generate.engine.builtin.vision_encoder import RequestImages
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.generate.engine.concurrency import ConcurrencyController
from rondel.text.tokenization import decode_answer

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.adapter_receiver import AdapterReceiver
    from rondel.generate.engine.builtin.encoder_lead import EncoderLead
    from rondel.generate.engine.builtin.lead_rank import LeadRank
    from rondel.models.compilation import CompiledModel
    from rondel.models.cuda_graphs import DecodeGraphs
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.static_decode import StaticDecode
    from rondel.runtime.journal.wal import TokenLog

CAN = ("logprobs", "hold", "drain", "abort", "score", "progress")


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
        compiled: CompiledModel | DecodeGraphs | StaticDecode | None = None,
        transports: Mapping[str, Transport] | None = None,
        log: TokenLog | None = None,
        concurrency: ConcurrencyController | None = None,
        claim: MemoryClaim | None = None,
        ranks: LeadRank | EncoderLead | None = None,
        receiver: AdapterReceiver | None = None,
        decode_ahead: bool = False,
    ) -> None:
        """`concurrency`: who finds out how many of max_running should work together; without one all may.

        `claim`: on the memory of a device that a trainer wants, too; without one there is nobody to ask.
        `ranks`: the processes beside this one that hold the other parts of its model, or its tower, if there are any.
        `receiver`: who takes new weights, where those that change are adapters on this model.
        `decode_ahead`: begin a decode step before the host has read the one in front of it. For a device that computes
        beside the host; off until it has been measured on one (`rondel bench gpu`).
        """
        self.loaded, self.claim, self.log = loaded, claim, log
        given = transports or {}
        self.arrivals = receiver or (WeightReceiver(loaded, given) if ranks is None else ranks.weight_receiver(given))
        self.pages = PageAllocator(kv_pages, ranks=1 if ranks is None else ranks.caches)
        states = SequenceStates(max_running) if loaded.state_bytes else None
        self.scheduler = Scheduler(self.pages, max_running=max_running, prefill_tokens=prefill_tokens, states=states)
        if ranks is not None:
            ranks.attach(self.scheduler.caches)
        if concurrency is not None:
            self.scheduler.limit = concurrency.limit
        self.speculation = speculation
        if speculation is not None:
            speculation.attach_model(loaded, kv_pages)
        draft = speculation.draft if speculation else None
        self.runner = ((ranks and ranks.runner) or ModelRunner)(
            loaded, self.pages, max_running, records=routes, draft=draft, compiled=compiled, states=states
        )
        owns = bool(transports)
        self.resting = MemoryRelease(loaded, compiled, owns=owns) if ranks is None else ranks.memory_release(owns)
        self.grammars = GrammarCache(loaded)
        self.validator = RequestValidator(loaded, self.runner)
        self.lifecycle = EngineLifecycle(version, lambda: self.arrivals.is_overwriting)
        self.answers, self._sequence_log = AnswerDelivery(loaded, self.scheduler), SequenceLog(log, self.pages)
        follows = decode_ahead and speculation is None and states is None and not loaded.leads_ranks
        self.serving = ServingLoop(
            run,
            self.lifecycle,
            self.scheduler,
            self.runner,
            self.answers,
            self._sequence_log,
            speculation=speculation,
            concurrency=concurrency,
            weights=self._own_weight_bytes,
            ahead=DecodeAhead(self.scheduler) if follows else None,
        )
        self.account = self.serving.account
        self.update = EngineUpdate(self.arrivals, self.lifecycle, self.serving)

    @property
    def version(self) -> int:
        return self.lifecycle.version

    @version.setter
    def version(self, version: int) -> None:
        self.lifecycle.version = version

    @property
    def state(self) -> str:
        return self.lifecycle.state

    @property
    def context_limit(self) -> int:
        """Tokens that a prompt and its answer can have together."""
        return min(self.loaded.max_context, self.pages.count)

    def _own_weight_bytes(self) -> dict[str, int]:
        """Of an engine that shares a trainer's module nothing."""
        return self.resting.memory_bytes if self.resting.owns else {}

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request, *, on_token: Heard | None = None) -> Completion:
        """`on_token` is told of every token as it is drawn, for streams."""
        self.lifecycle.refuse_if_broken()
        self.validator.check_generation(request)
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
            gaze=RequestImages.from_request(request, self.loaded.sight, self.runner.eyes.encoder)
            if request.media
            else None,
            adapter=self.loaded.bank.cache_name(request.adapter) if self.loaded.bank is not None else "",
        )
        await self._prepare_sampling(live)
        self.validator.check_adapter(request)  # it may have been removed while a grammar was compiled
        if reason := self._sequence_log.restore_tokens(live):
            return await self._with_text(self.answers.build_completion(live, reason))
        self.scheduler.waiting.append(live)
        if request.lines is not None:
            self.scheduler.begin_replay(self.version)
        self.serving.wake_up()
        try:
            async with asyncio.timeout(request.deadline):
                return await self._with_text(await done)
        except TimeoutError as error:
            raise stalled_error(
                f"a request waits for the engine since {request.deadline} s; it had written {live.written} tokens, "
                f"engine {self.state}"
            ) from error
        finally:
            if done.cancelled():  # the caller went away
                self.serving.remove_request(live)

    async def progress(self, known: Mapping[int, int]) -> Progress:
        return written_so_far([*self.scheduler.running, *self.scheduler.waiting], known)

    async def _with_text(self, completion: Completion) -> Completion:
        if completion.text is None:
            completion.text = await decode_answer(self.loaded.tokenizer, completion.tokens)
        return completion

    async def _prepare_sampling(self, live: SequenceState) -> None:
        """What its sampling needs beside the logits. A grammar is compiled on the device's thread, where it is used."""
        request, own = live.request, live.tokens[live.prompt - live.request.continuation :]
        ids, strings = (
            split_stops(self.loaded.tokenizer, stop) if (stop := request.sampling.stop) else (frozenset(), ())
        )
        live.ends = ids if request.sampling.ignore_eos else ids | self.loaded.stop_ids
        live.reader = open_reader(self.loaded.tokenizer, strings, own) if strings else None
        wanted = request.wants - {"experts"}
        live.channels = open_channels(wanted, self.loaded.vocabulary) if wanted else None
        if request.sampling.grammar is not None:
            live.constraint = await self.serving.run(self.grammars.start_constraint, request.sampling.grammar, own)
            self.lifecycle.refuse_if_broken()
        else:
            self._sequence_log.mark_context(live)

    async def score(self, request: Request) -> TokenScores:
        self.lifecycle.refuse_if_broken()
        if self.arrivals.is_overwriting:
            raise EngineError("new weights are arriving: score before the update begins or after its commit")
        if "weights" in self.lifecycle.asleep:
            raise EngineError("the weights are asleep: wake them before anything is scored")
        self.validator.check_scoring(request)
        version = self.version
        self.serving.account.switch_to("score" if self.serving.has_stopped else "generate")
        try:
            images = RequestImages.from_request(request, self.loaded.sight) if request.media else None
            return TokenScores(
                await self.serving.run(self.runner.score, request.tokens, images, request.adapter), version
            )
        finally:
            self.serving.update_account()

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
            pages_free=s.caches.page_counts["free"],
            pages_cached=s.caches.page_counts["cached"],
            pages_total=s.caches.page_counts["total"],
            capabilities=frozenset(
                {
                    *CAN,
                    *(f"update_{kind}" for kind in self.arrivals.route_kinds),
                    *(["images"] if self.loaded.sight else []),
                }
            ),
            root=self.arrivals.root,
            bytes_copied=self.arrivals.bytes_copied,
            memory={"kv_cache": self.runner.cache_bytes, **self._own_weight_bytes()},
        )

    async def pause(self, how: Interrupt = "hold", lease: float = inf) -> None:
        """hold: park requests between two steps, caches kept. drain: let the begun ones
        end. abort: return what is written.

        Those of a replayed run are first brought to their lines.
        """
        check_interrupt(how)
        serving = self.serving
        self.lifecycle.end_lease()
        while self.state == "serving" and self.scheduler.is_behind(self.version):
            serving.wake_up()
            if serving.has_stopped:  # nobody may move; whoever is not at its line is named when the weights change
                break
            await serving.wait_for_task()
        await self.lifecycle.hold(how, serving.wait_until_stopped, serving.wake_up)
        if how == "abort":
            for live in [*self.scheduler.running, *self.scheduler.waiting]:
                self.answers.finish_sequence(live, "abort", self.version)
        self.lifecycle.begin_lease(lease, serving.wake_up)

    async def resume(self) -> None:
        self.lifecycle.end_lease()
        self.lifecycle.held = False
        self.serving.wake_up()

    async def abort(self, which: Callable[[Request], bool]) -> int:
        """Requests of which this is true return what they have written, between two steps. -> how many there are."""
        return self.serving.abort_requests(which)

    async def remove_adapter(self, name: str) -> None:
        """Requests of it are refused from now on, and its answers that are being written end here; then it is gone."""
        self.validator.check_served(name)
        self.validator.leaving.add(name)
        try:
            await self.abort(lambda request: request.adapter == name)
            assert self.loaded.bank is not None
            await self.serving.run(self.loaded.bank.remove, name)
        finally:
            self.validator.leaving.discard(name)

    async def flush_cache(self) -> int:
        """Forget every cached prefix; parked requests keep their tokens and compute their
        context again. -> pages that became free.
        """
        if self.serving.is_busy:
            raise EngineError("flush while requests run: pause the engine first, or wait until it is idle")
        free = self.scheduler.caches.page_counts["free"]
        self.scheduler.drop_cache(self.version)
        self.runner.eyes.forget_features()
        return self.scheduler.caches.page_counts["free"] - free

    async def sleep(self, tags: Tags) -> None:
        """Give memory back by tag. Parked requests keep their tokens; without their
        cache they compute it again (law 8).
        """
        if not tags:
            return
        if self.serving.is_busy:
            raise EngineError("sleep while requests run: pause the engine first")
        if "kv_cache" in tags:
            self.scheduler.drop_cache(self.version)
            self.pages.release_memory()
            if self.runner.states is not None:
                self.runner.states.memory.clear()
            if self.loaded.sight is not None:
                self.runner.eyes.forget_features()
            if self.runner.draft is not None:
                self.runner.draft.release_memory()
            if self.claim is not None:
                self.claim.leave("engine")
        if beside := tuple(tag for tag in tags if tag != "kv_cache"):
            await self.serving.run(self.resting.sleep, beside)
        self.lifecycle.asleep.update(tags)
        self.serving.update_account()

    async def wake(self, tags: Tags) -> None:
        """Awake when every tag is back."""
        if "kv_cache" in tags and self.claim is not None:
            self.claim.take("engine")
        if beside := tuple(tag for tag in tags if tag != "kv_cache"):
            await self.serving.run(self.resting.wake, beside)
        self.lifecycle.asleep.difference_update(tags)
        self.serving.wake_up()

    async def receive(self, message: Message) -> int:
        """begin -> route -> commit, or abort. -> the version served."""
        await self.update.receive(message)
        return self.version
