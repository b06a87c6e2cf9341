"""An engine whose model draws points or actions: one device and one module, which it may share with the trainer.

All requests in flight take their next step together, in one pass of the model. Noise is counter-based, and a row of a
pass has the same bits whoever is beside it, so when a step is drawn does not change it.

generate ──> chains ──draw_steps──> the device's thread ──> log ──> completions
receive  ──> StepUpdate ──> weight receiver
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rondel.core.errors import EngineError, UserError
from rondel.core.events import stalled_error
from rondel.core.protocols import Interrupt, Tags, Transport
from rondel.core.time_account import TimeAccount
from rondel.core.types import Commit, Completion, EngineStatus, Message, Request, TokenScores
from rondel.generate.engine.builtin.engine_update import EngineUpdate
from rondel.generate.engine.builtin.lifecycle import EngineLifecycle, check_interrupt
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.generate.engine.step_log import StepLog
from rondel.generate.engine.step_request import StepRequest
from rondel.models.main_grad import weights_changed

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.runtime.journal.wal import TokenLog

CAN = ("logprobs", "hold", "drain", "abort", "score")


class StepEngine:
    """The Engine protocol over a `LoadedModel` with a `StepHead`. `run` executes a function on the device's own thread."""

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
        self.loaded, self.run, self.max_running, self.log = loaded, run, max_running, StepLog(log)
        self.head = loaded.head
        self.arrivals = WeightReceiver(loaded, transports or {})
        self.lifecycle = EngineLifecycle(version, lambda: self.arrivals.is_overwriting)
        self.account = TimeAccount("engine")
        self.chains: list[StepRequest] = []
        self._task: asyncio.Task[None] | None = None
        self.update = StepUpdate(self)

    @property
    def version(self) -> int:
        return self.lifecycle.version

    @version.setter
    def version(self, version: int) -> None:
        self.lifecycle.version = version

    @property
    def is_busy(self) -> bool:
        """Whether a step runs or will: parked requests do not count (law 8)."""
        return self._task is not None and bool(self.chains)

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self.lifecycle.refuse_if_broken()
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        chain = self.open_request(request, done)
        self.log.restore(chain)
        if chain.is_whole:
            chain.finish("stop")
            return await done
        self.chains.append(chain)
        self.wake_up()
        try:
            async with asyncio.timeout(request.deadline):
                return await done
        except TimeoutError as error:
            raise stalled_error(
                f"a request waits for the engine since {request.deadline} s; it had drawn {chain.step} steps, engine "
                f"{self.lifecycle.state}"
            ) from error
        finally:
            if chain in self.chains:  # the caller went away
                self.chains.remove(chain)

    async def score(self, request: Request) -> TokenScores:
        self.lifecycle.refuse_if_broken()
        if self.arrivals.is_overwriting:
            raise EngineError("new weights are arriving: score before the update begins or after its commit")
        return TokenScores(await self.run(self.head.score_prompt, list(request.tokens)), self.version)

    def open_request(self, request: Request, done: asyncio.Future[Completion]) -> StepRequest:
        """What it draws, of which nothing is drawn yet. UserError where it cannot be drawn."""
        raise NotImplementedError

    # -- steps -----------------------------------------------------------------------------------

    def draw_steps(self, chains: list[Any]) -> tuple[np.ndarray, list[float]]:
        """On the device's thread: what the next step of each draws, [n, D], and its log-density."""
        raise NotImplementedError

    @property
    def _may_step(self) -> bool:
        life = self.lifecycle
        begun = life.admits or any(chain.rows for chain in self.chains)
        return bool(self.chains) and life.state == "serving" and begun

    def wake_up(self) -> None:
        """There may be something to do."""
        if self._task is None and self._may_step:
            self._task = asyncio.create_task(self._step_until_done(), name="engine")
        self.update_account()

    def update_account(self) -> None:
        """`held` is a wait for the trainer or an update, `idle` one for whoever asks."""
        state = self.lifecycle.state
        self.account.switch_to("generate" if self._task is not None else {"serving": "idle"}.get(state, state))

    async def _step_until_done(self) -> None:
        try:
            for _ in range(4):  # whoever is about to ask, asks: the passes are fewer
                await asyncio.sleep(0)
            while self._may_step:
                now = [chain for chain in self.chains if self.lifecycle.admits or chain.rows][: self.max_running]
                version = self.version
                drawn, densities = await self.run(self.draw_steps, now)
                self.log.record_step(now, drawn, densities, version)
                for chain, point, density in zip(now, drawn, densities, strict=True):
                    chain.append(point, density, version)
                self.chains = [chain for chain in self.chains if not chain.is_whole]
                for chain in now:
                    if chain.is_whole:
                        chain.finish("stop")
                for name, n in (("steps", 1), ("tokens", len(now)), ("requests", len(now))):
                    self.account.counts[name] += n
                await asyncio.sleep(0)
        except BaseException as error:
            self.lifecycle.broken = f"its step broke: {type(error).__name__}: {error}"
            for chain in self.chains:
                chain.fail(error if isinstance(error, UserError) else EngineError(self.lifecycle.broken))
            self.chains.clear()
            if not isinstance(error, Exception):
                raise
        finally:
            self._task = None
            self.update_account()

    # -- control ---------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        state = self.lifecycle.state
        parked = len(self.chains) if state != "serving" else 0
        kinds = (f"update_{kind}" for kind in self.arrivals.route_kinds)
        return EngineStatus(
            version=self.version,
            state=state,
            running=len(self.chains) - parked,
            waiting=0,
            parked=parked,
            pages_free=0,
            pages_cached=0,
            pages_total=0,
            capabilities=frozenset({*CAN, *kinds}),
            root=self.arrivals.root,
            bytes_copied=self.arrivals.bytes_copied,
            memory={"kv_cache": 0},
        )

    async def pause(self, how: Interrupt = "hold", lease: float = float("inf")) -> None:
        """hold: park requests between two steps. drain: let the begun ones end. abort: return what is drawn."""
        check_interrupt(how)
        self.lifecycle.end_lease()
        await self.lifecycle.hold(how, self._wait_until_stopped, self.wake_up)
        if how == "abort":
            await self.abort(lambda request: True)
        self.lifecycle.begin_lease(lease, self.wake_up)

    async def _wait_until_stopped(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])

    async def resume(self) -> None:
        self.lifecycle.end_lease()
        self.lifecycle.held = False
        self.wake_up()

    async def abort(self, which: Callable[[Request], bool]) -> int:
        """Requests of which this is true return what they have drawn; a step under way is no part of it. -> how many."""
        found = [chain for chain in self.chains if which(chain.request)]
        self.chains = [chain for chain in self.chains if chain not in found]
        for chain in found:
            chain.finish("abort")
        return len(found)

    async def sleep(self, tags: Tags) -> None:
        """There is no cache; parked requests keep their steps."""
        if self.is_busy:
            raise EngineError("sleep while requests run: pause the engine first")
        self.lifecycle.asleep.update(tags)
        self.update_account()

    async def wake(self, tags: Tags) -> None:
        self.lifecycle.asleep.difference_update(tags)
        self.wake_up()

    async def receive(self, message: Message) -> int:
        """begin -> route -> commit, or abort. -> the version served."""
        await self.update.receive(message)
        return self.version


class StepUpdate(EngineUpdate):
    """The transaction of the token engine, whose commit has no cache and no draft to forget."""

    def __init__(self, engine: Any) -> None:
        """`engine`: a StepEngine, which is its own serving loop."""
        super().__init__(engine.arrivals, engine.lifecycle, engine)
        self.engine = engine

    async def _commit(self, commit: Commit) -> None:
        engine = self.engine
        await engine.run(engine.arrivals.commit_update, commit)
        weights_changed()
        engine.lifecycle.version, engine.lifecycle.broken = commit.version, ""
        engine.log.record_version(commit.version, commit.root)
        engine.wake_up()

    def _report_version(self) -> None:
        account = self.engine.account
        if steps := account.counts["steps"]:
            account.counts["room"] = steps * self.engine.max_running
        account.report_time({"kv_cache": 0})
