"""The built-in engine: one device, one module shared with the trainer. schedule -> run -> deliver, until nothing is left.

The event loop owns the bookkeeping, the device thread owns the arithmetic: between two steps nothing of the engine runs.

    serving ──pause──> held ──sleep──> asleep        a failed update: refusing, until a good one
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rondel.generate.engine.builtin.pages import Pages
from rondel.generate.engine.builtin.request import Live
from rondel.generate.engine.builtin.runner import Runner
from rondel.generate.engine.builtin.scheduler import Scheduler
from rondel.models import names
from rondel.models.load import Loaded
from rondel.words.errors import EngineError, StalledError, SyncError, UserError
from rondel.words.events import Generating, Warned, emit
from rondel.words.types import Abort, Begin, Commit, Completion, EngineStatus, Message, Request, Route, Scored

HEARTBEAT = 0.5


class BuiltinEngine:
    """The Engine protocol over `Loaded`. `run` executes a function on the device's own thread."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        run: Callable[..., Awaitable[Any]],
        kv_pages: int,
        max_running: int = 64,
        prefill_tokens: int = 2048,
        version: int = 0,
    ) -> None:
        self.loaded, self._run = loaded, run
        self.pages = Pages(kv_pages)
        self.scheduler = Scheduler(self.pages, max_running=max_running, prefill_tokens=prefill_tokens)
        self.runner = Runner(loaded, self.pages, max_running)
        self.version, self.state = version, "serving"
        self.bytes_copied = 0
        self.seconds = 0.0  # spent in steps
        self._admits = True
        self._pump: asyncio.Task | None = None
        self._update: Begin | None = None
        self._lease: asyncio.TimerHandle | None = None

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._refuse_if_broken()
        self._check(request)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def finish(result: Completion | Exception) -> None:
            if not done.done():
                done.set_result(result) if isinstance(result, Completion) else done.set_exception(result)

        live = Live(request, finish, list(request.tokens), len(request.tokens))
        self.scheduler.waiting.append(live)
        self._wake_pump()
        try:
            async with asyncio.timeout(request.deadline):
                return await done
        except TimeoutError as error:
            raise StalledError(f"a request waits for the engine since {request.deadline} s; it had written {live.written} tokens, engine {self.state}") from error
        finally:
            if not done.done() or done.cancelled():  # the caller went away
                self.scheduler_leave(live)

    async def score(self, request: Request) -> Scored:
        self._refuse_if_broken()
        if not 1 <= len(request.tokens) <= self.loaded.max_context:
            raise UserError(f"{len(request.tokens)} tokens cannot be scored; this model carries 1 to {self.loaded.max_context}")
        return Scored(await self._run(self._score, request.tokens), self.version)

    def _score(self, tokens: list[int]) -> list[float]:
        if self.pages.free < len(tokens):
            self.pages.give(self.scheduler.tree.evict(len(tokens) - self.pages.free))
        if self.pages.free < len(tokens):
            raise EngineError(f"scoring {len(tokens)} tokens needs as many pages; {self.pages.free} are free. Raise engine.kv_pages")
        return self.runner.score(tokens)

    def _check(self, request: Request) -> None:
        prompt, new = len(request.tokens), request.sampling.max_tokens
        if not prompt:
            raise UserError("an empty prompt: a language model needs at least one token to go on from")
        if prompt + new > self.loaded.max_context:
            raise UserError(f"{prompt} prompt tokens + max_tokens {new} exceed the model's context of {self.loaded.max_context}: shorten the prompt or lower max_tokens")
        if prompt + new > self.pages.count:
            raise UserError(f"{prompt} prompt tokens + max_tokens {new} do not fit into {self.pages.count} cache pages: raise engine.kv_pages")

    # -- the pump --------------------------------------------------------------------------------

    def _wake_pump(self) -> None:
        if self.state == "serving" and self.scheduler.has_work and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._serve(), name="engine")

    async def _serve(self) -> None:
        """Step until nothing is left or a pause arrives."""
        await self._settle()
        told, tokens, began = time.perf_counter(), 0, time.perf_counter()
        while self.state == "serving" and self.scheduler.has_work and (self._admits or self.scheduler.running):
            try:
                plan = self._plan()
                drawn = await self._run(self.runner.step, plan)
            except Exception as error:
                self._fail_all(error)
                return
            self.scheduler.computed(plan)
            for live, token, logprob in drawn:
                self._deliver(live, token, logprob)
            tokens += len(drawn)
            if (now := time.perf_counter()) - told > HEARTBEAT:
                emit(Generating(len(self.scheduler.running), len(self.scheduler.waiting), tokens, now - began))
                told = now
            await asyncio.sleep(0)
        self.seconds += time.perf_counter() - began
        if not self.scheduler.running:
            self.scheduler.check()

    async def _settle(self) -> None:
        """Let everyone who is about to ask, ask: the first batch then does not depend on the order of wake-ups."""
        seen = -1
        while seen != len(self.scheduler.waiting):
            seen = len(self.scheduler.waiting)
            for _ in range(4):
                await asyncio.sleep(0)

    def _plan(self):
        if self._admits:
            return self.scheduler.plan(self.version)
        held_back, self.scheduler.waiting = self.scheduler.waiting, type(self.scheduler.waiting)()
        try:
            return self.scheduler.plan(self.version)
        finally:
            self.scheduler.waiting.extend(held_back)

    def _deliver(self, live: Live, token: int, logprob: float) -> None:
        if live not in self.scheduler.running:  # aborted meanwhile
            return
        live.first = live.first or time.perf_counter()
        live.tokens.append(token)
        live.logprobs.append(logprob)
        live.versions.append(self.version)
        if reason := live.done(self.loaded.stop_ids):
            self._finish(live, reason)

    def _finish(self, live: Live, reason: str) -> None:
        completion = live.completion(reason)
        completion.text = self.loaded.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        self.scheduler.release(live, self.version)
        self.scheduler.sweep(self.version)
        live.finish(completion)

    def scheduler_leave(self, live: Live) -> None:
        self.scheduler.release(live, self.version)

    def _fail_all(self, error: Exception) -> None:
        """A step broke: everyone learns why, and the engine refuses until its weights are updated."""
        self.state = "refusing"
        for live in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.release(live, self.version)
            live.finish(error if isinstance(error, UserError) else EngineError(f"the engine's step broke: {type(error).__name__}: {error}"))

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
            pages_free=self.pages.free,
            pages_cached=s.tree.cached,
            pages_total=self.pages.count,
            capabilities=frozenset({"logprobs", "hold", "drain", "abort", "update_tensor", "score"}),
        )

    async def pause(self, how: str = "hold", lease: float = float("inf")) -> None:
        """hold: park requests between two steps, caches kept. drain: let the running ones end. abort: return what is written."""
        if how == "drain" and self.state == "serving":
            self._admits = False
            while self.scheduler.running and self._pump is not None and not self._pump.done():
                await self._pump
        self.state = "held" if self.state == "serving" else self.state
        if self._pump is not None and not self._pump.done():
            await self._pump
        if how == "abort":
            for live in [*self.scheduler.running, *self.scheduler.waiting]:
                self._finish(live, "abort")
        if lease != float("inf"):
            self._lease = asyncio.get_running_loop().call_later(lease, self._lease_ended, lease)

    async def resume(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._admits = True
        if self.state == "held":
            self.state = "serving"
        self._wake_pump()

    def _lease_ended(self, lease: float) -> None:
        emit(Warned(f"the engine was paused for {lease:.0f} s and nobody resumed it; it serves again at version {self.version}"))
        self._admits = True
        if self.state == "held":
            self.state = "serving"
            self._wake_pump()

    async def sleep(self, tags: tuple[str, ...]) -> None:
        """Give memory back by tag. Parked requests keep their tokens; without their cache they compute it again (law 8)."""
        if not tags:
            return
        if self.state == "serving" and self.scheduler.has_work:
            raise EngineError("sleep while requests run: pause the engine first (law 8)")
        if "kv_cache" in tags:
            self.scheduler.drop_cache()
            self.pages.release_memory()
        self.state = "asleep" if self.state in ("serving", "held") else self.state

    async def wake(self, tags: tuple[str, ...]) -> None:
        if tags and self.state == "asleep":
            self.state = "held" if self.scheduler.has_work else "serving"
            if self.state == "held":
                return
        self._wake_pump()

    # -- weights ---------------------------------------------------------------------------------

    async def receive(self, message: Message) -> int:
        """begin -> route -> commit, or abort. The tensors are written in place: until a commit holds, the engine refuses."""
        if self.state == "serving" and self.scheduler.has_work:
            raise SyncError("weights arrived while requests run: pause the engine first")
        match message:
            case Begin():
                self._begin(message)
            case Route(data=tensors):
                await self._run(self._copy_in, tensors)
            case Commit():
                await self._commit(message)
            case Abort(reason=reason):
                self._update = None
                self._break(f"the update was aborted ({reason})")
        return self.version

    def _begin(self, begin: Begin) -> None:
        mine = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in names.weights(self.loaded.model)}
        theirs = {t.name: (t.shape, t.dtype) for t in begin.manifest.tensors}
        missing, unknown = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
        wrong = sorted(n for n in set(mine) & set(theirs) if mine[n] != theirs[n])
        for what, found in (("missing", missing), ("unknown", unknown), ("of another shape or dtype", wrong)):
            if found:
                self._break(f"{len(found)} tensors are {what}, first {found[0]}")
        self._update = begin

    def _copy_in(self, tensors: dict[str, Any]) -> None:
        self.bytes_copied = 0
        for name, mine in names.weights(self.loaded.model):
            theirs = tensors.get(name)
            if theirs is None:
                self._break(f"'{name}' was announced but did not travel")
            if theirs.data_ptr() != mine.data_ptr() or theirs.device != mine.device:
                mine.copy_(theirs)
                self.bytes_copied += mine.numel() * mine.element_size()

    async def _commit(self, commit: Commit) -> None:
        if self._update is None:
            self._break("commit without begin")
        manifest = await self._run(names.manifest, self.loaded.model, commit.version)
        if manifest.root != commit.root:
            sent = {t.name: t.digest for t in self._update.manifest.tensors}
            wrong = [t.name for t in manifest.tensors if sent.get(t.name) != t.digest]
            self._break(f"{len(wrong)} tensors arrived with other bits than were sent, first {wrong[0] if wrong else '?'}")
        self._update = None
        self.version = commit.version
        self.scheduler.new_version(self.version)
        if self.state == "refusing":
            self.state = "held"

    def _break(self, why: str) -> None:
        self.state = "refusing"
        raise SyncError(f"{why}; the engine refuses to generate until a good update (law 6)")

    def _refuse_if_broken(self) -> None:
        if self.state == "refusing":
            raise EngineError("the engine refuses: its last weight update did not arrive whole (law 6)")
