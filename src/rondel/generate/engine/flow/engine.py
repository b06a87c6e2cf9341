"""The engine of a flow: one device and one module, which it may share with the trainer.

A request is a prompt, a key and a number of steps K; its completion is K points with the log-density of each. All
requests in flight take their next step together, in one pass of the model. Noise is counter-based (`draw_normal`), and
a row of a pass has the same bits whoever is beside it, so when a chain is drawn does not change it.

generate ──> chains ──_step──> the device's thread ──> log ──> completions
receive  ──> FlowUpdate ──> weight receiver
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rondel.core.errors import EngineError, UserError
from rondel.core.events import stalled_error
from rondel.core.protocols import Interrupt, Tags, Transport
from rondel.core.time_account import TimeAccount
from rondel.core.types import Completion, EngineStatus, Message, Request, TokenScores
from rondel.generate.engine.builtin.lifecycle import EngineLifecycle, check_interrupt
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.generate.engine.flow.chain import Chain
from rondel.generate.engine.flow.step_log import StepLog
from rondel.generate.engine.flow.update import FlowUpdate
from rondel.models.flow.packed_steps import PackedSteps
from rondel.models.flow.transition import log_density, step_mean

if TYPE_CHECKING:
    from rondel.models.flow.flow_head import FlowHead
    from rondel.models.loaded_model import LoadedModel
    from rondel.runtime.journal.wal import TokenLog

CAN = ("logprobs", "hold", "drain", "abort", "score")


class FlowEngine:
    """The Engine protocol over a `LoadedModel` with a `FlowHead`. `run` executes a function on the device's own thread."""

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
        self.head: FlowHead = loaded.head
        self.arrivals = WeightReceiver(loaded, transports or {})
        self.lifecycle = EngineLifecycle(version, lambda: self.arrivals.is_overwriting)
        self.account = TimeAccount("engine")
        self.chains: list[Chain] = []
        self._task: asyncio.Task[None] | None = None
        self.update = FlowUpdate(self)

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
        if len(request.tokens) + request.sampling.max_tokens > self.loaded.max_context:
            raise UserError(
                f"{len(request.tokens)} tokens and {request.sampling.max_tokens} steps do not fit into a context of "
                f"{self.loaded.max_context}; set max_position_embeddings of the model"
            )
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        chain = Chain.of(request, done, self.head.dim)
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

    # -- steps -----------------------------------------------------------------------------------

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
                drawn, densities = await self.run(self._draw, now)
                self.log.record_step(now, drawn, densities, version)
                for chain, point, density in zip(now, drawn, densities, strict=True):
                    chain.append(point, density, version)
                    if chain.is_whole:
                        self.chains = [other for other in self.chains if other is not chain]
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

    @torch.no_grad()
    def _draw(self, chains: list[Chain]) -> tuple[np.ndarray, list[float]]:
        """On the device's thread: the next point of each, [n, D], and its log-density; 0 where nothing is random."""
        dim, device = self.head.dim, self.loaded.device
        rows = [np.concatenate([c.point, c.noise(), c.numbers[c.step]])[None] for c in chains]
        steps = PackedSteps.of(rows, [c.prompt for c in chains], device)
        x, noise, numbers = steps.rows[:, :dim], steps.rows[:, dim : 2 * dim], steps.rows[:, 2 * dim :]
        mean = step_mean(x, self.head.velocity(x, numbers[:, 0], steps), numbers[:, 1:])
        drawn, std = mean + numbers[:, 3:] * noise, numbers[:, 3]
        if not bool(drawn.isfinite().all()):
            raise EngineError("a point is not finite: the model's weights have overflowed")
        density = torch.where(std > 0, log_density(drawn, mean, std.clamp_min(1e-30)), torch.zeros_like(std))
        return drawn.cpu().numpy(), density.tolist()

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
        """hold: park chains between two steps. drain: let the begun ones end. abort: return what is drawn."""
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
        """A flow keeps no cache; parked chains keep their points."""
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
