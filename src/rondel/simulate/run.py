"""The loop of every run, with its buffer, on a virtual clock: engines and trainer take the
time that the planner says, and compute nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rondel import loop as house
from rondel.buffer import Buffer
from rondel.buffer.deadline import attempt_in_time
from rondel.core.errors import ConfigError
from rondel.core.types import KEEP, Group, Slot, StepStats, Task, Verdict
from rondel.planner import cost, flow_cost
from rondel.planner.flow_workload import FlowWorkload
from rondel.planner.overlap import idle_share
from rondel.planner.workload import Workload
from rondel.simulate.clock import VirtualLoop
from rondel.simulate.lengths import Lengths, log_normal
from rondel.simulate.pool import ReplicaPool

FOREVER = 1e12  # virtual seconds


@dataclass(frozen=True)
class SimulatedWorld:
    """Everything that takes time, in seconds.

    beat      [n] of one token of n requests on one engine; prefill of a prompt's token
    train     of a packed token; fixed: of a step, beside it
    answer    of the controller an answer, one after the other: book-keeping, reward
    sync      until the new version serves, of which the engines stand still `pause`
    shared    trainer and engines on the same devices, in turn
    slow      (share of the engines, times as slow)
    controllers  that share the answers, each behind its own
    parts     of a step's groups: the trainer begins with one as soon as its groups have finished, while the others are
              still written (M2Flow of RLinf, arXiv:2509.15965); the optimizer moves after the last one
    mtbf      of one engine, 0: none fails; it is back after `restart`, and what it wrote goes on elsewhere
    """

    engines: int
    places: int
    beat: list[float]
    prefill: float
    train: float
    lengths: Lengths
    prompts: int
    group: int
    prompt: float = 0.0
    fixed: float = 0.0
    answer: float = 0.0
    sync: float = 0.0
    pause: float = 0.0
    shared: bool = False
    staleness: int = 0
    window: int | None = None
    oversample: int = 0
    in_flight: str = "hold"
    slow: tuple[float, float] = (0.0, 1.0)
    controllers: int = 1
    parts: int = 1
    mtbf: float = 0.0
    restart: float = 300.0
    seed: int = 0


@dataclass
class SimulatedCounts:
    """What was counted, from the end of the first steps on."""

    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    tokens: float = 0.0
    training: float = 0.0
    syncing: float = 0.0
    rollout_busy: float = 0.0
    filled: float = 0.0  # requests x decode steps
    places: float = 0.0  # places x decode steps
    lags: Counter[int] = field(default_factory=Counter)
    failures: int = 0

    def to_dict(self, world: SimulatedWorld) -> dict[str, Any]:
        """Shares and rates."""
        return {
            "steps": self.steps,
            "step_seconds": self.seconds / self.steps,
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "mean_length": self.tokens / self.samples,
            "trainer_idle": idle_share(self.training + self.syncing, self.seconds),
            "rollout_idle": idle_share(self.rollout_busy, self.seconds * world.engines),
            "places_idle": idle_share(self.filled, max(1e-12, self.places)),
            "decode_steps": self.places / (world.places * world.engines * self.steps),
            "sync_share": self.syncing / self.seconds,
            "lags": {str(lag): n / sum(self.lags.values()) for lag, n in sorted(self.lags.items())},
            "failures": self.failures,
        }


def world_of(
    setting: Workload | FlowWorkload, lengths: Lengths | None = None, *, sigma: float = 0.8, **more: Any
) -> SimulatedWorld:
    """The planner's times of a setting."""
    if isinstance(setting, FlowWorkload):
        return flow_world(setting, lengths, **more)
    requests, middle = cost.group_concurrency(setting), setting.prompt + setting.mean / 2
    arguments = cost.decode_arguments(setting)
    scale = cost.measured_decode_scale(setting)
    beat = [
        scale * cost.decode_seconds(setting.shape, setting.hardware, max(1, n), middle, **arguments)
        for n in range(requests + 1)
    ]
    way = cost.sync_options(setting)[0]
    return SimulatedWorld(
        engines=setting.engine_count,
        places=requests,
        beat=beat,
        prefill=cost.prefill_seconds(
            setting.shape, setting.hardware, 1, tensor=setting.engine_size, width=setting.width
        ),
        train=cost.tokens_seconds(setting) / setting.packed_tokens,
        lengths=lengths or log_normal(setting.mean, sigma, setting.output),
        prompts=setting.prompts,
        group=setting.group,
        prompt=setting.prompt,
        fixed=setting.epochs * (cost.calls_seconds(setting) + setting.updates * cost.update_seconds(setting)),
        answer=setting.hardware.answer,
        sync=way.seconds,
        pause=way.pause,
        shared=not setting.split,
        staleness=setting.staleness,
        in_flight=setting.in_flight,
        **more,
    )


def flow_world(setting: FlowWorkload, lengths: Lengths | None = None, **more: Any) -> SimulatedWorld:
    """Of a flow an answer is K denoising steps, all as long, and n samples together take n times as long as one. The
    traffic of training is that of the setting's mesh.
    """
    if lengths is not None:
        raise ConfigError(
            f"every sample of a flow has {setting.output} denoising steps: leave --lengths and --tail out"
        )
    each, places, way = flow_cost.draw_seconds(setting), setting.drawn_together, cost.sync_options(setting)[0]
    drawn = setting.samples * setting.output
    return SimulatedWorld(
        engines=setting.engine_count,
        places=places,
        beat=[max(1, n) * each for n in range(places + 1)],
        prefill=0.0,
        train=flow_cost.make_layout(setting, setting.mesh).seconds / drawn,
        lengths=lambda draw: float(setting.output),
        prompts=setting.prompts,
        group=setting.group,
        answer=setting.hardware.answer,
        sync=way.seconds,
        pause=way.pause,
        shared=not setting.split,
        staleness=setting.staleness,
        in_flight=setting.in_flight,
        **more,
    )


def simulate(world: SimulatedWorld, *, steps: int = 20, first: int | None = None) -> dict[str, Any]:
    """`steps` steps after the `first` ones, which fill the buffer and are not counted."""
    before = world.staleness + 2 if first is None else first
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(Simulation(world, before, steps).run()).to_dict(world)


class Simulation:
    """The parts that `loop.run` asks for. Nothing in here decides who is admitted, taken
    or waits: the house's loop and buffer do.
    """

    def __init__(self, world: SimulatedWorld, before: int, steps: int) -> None:
        self.world, self.before, self.steps = world, before, steps
        self.draw, self.faults = random.Random(world.seed), random.Random(world.seed + 1)
        self.tokens: dict[int, float] = {}
        self.seen = SimulatedCounts()
        self.free = [0.0] * world.controllers  # when each controller has done what it was given
        self.finished: dict[int, float] = {}  # when a group was, by number
        self.trainer_free = 0.0

    async def run(self) -> SimulatedCounts:
        w = self.world
        self.clock = asyncio.get_running_loop()
        self.pool = ReplicaPool(w.engines, places=w.places, beat=w.beat, prefill=w.prefill, slow=w.slow)
        self.buffer = Buffer(
            groups_per_step=w.prompts,
            max_staleness=w.staleness,
            window=w.window,
            oversample=w.oversample,
            patience=FOREVER,
        )
        self._began = (0.0, 0.0, 0.0, 0.0, 0)
        breaking = asyncio.create_task(self.break_some()) if w.mtbf else None
        await house.run(
            self.endless_tasks(),
            self.buffer,
            attempt=self.generate_group,
            score=self.score,
            judge=self.judge,
            prepare=self.prepare,
            trainer=self,
            engine=None,
            devices=self,
            sync=self.sync,
            algo=None,
            steps=range(1, self.before + self.steps + 1),
            milestone=self.milestone,
        )
        if breaking is not None:
            breaking.cancel()
        return self.seen

    # -- generate, score, filter -----------------------------------------------------------------

    async def endless_tasks(self) -> AsyncIterator[Task]:
        while True:
            yield Task("simulated", "", {})

    async def generate_group(self, slot: Slot) -> Group:
        lengths = [self.world.lengths(self.draw) for _ in range(self.world.group)]
        self.tokens[slot.number] = sum(lengths)
        work = self.pool.generate_group(lengths, self.world.prompt)
        group = Group(slot.number, slot.task, [], slot.born)
        if self.world.oversample:

            async def finish_group(_: Slot) -> Group:
                await work
                return group

            return await attempt_in_time(self.buffer, slot, finish_group)
        await work
        return group

    async def score(self, group: Group) -> None:
        """Behind those that came before it at its controller."""
        if w := self.world.answer * self.world.group:
            mine = group.id % self.world.controllers
            self.free[mine] = max(self.free[mine], self.clock.time()) + w
            await asyncio.sleep(self.free[mine] - self.clock.time())
        self.finished[group.id] = self.clock.time()

    def judge(self, group: Group) -> Verdict:
        return KEEP

    async def break_some(self) -> None:
        while True:
            await asyncio.sleep(self.faults.expovariate(self.world.engines / self.world.mtbf))
            self.pool.fail_replica(self.faults.randrange(self.world.engines), self.world.prompt, self.world.restart)

    # -- train, sync -----------------------------------------------------------------------------

    async def prepare(self, groups: list[Group]) -> list[Group]:
        return groups

    async def step(self, groups: list[Group], algo: Any) -> StepStats:
        written = sum(self.tokens.pop(group.id) for group in groups)
        seconds = self.world.fixed + self.world.train * (written + len(groups) * self.world.prompt)
        await asyncio.sleep(max(0.0, self._end_of_step(groups, seconds) - self.clock.time()))
        self.seen.training += seconds
        self.seen.tokens += written
        self.seen.samples += len(groups) * self.world.group
        self.seen.lags.update(self.buffer.version - group.born for group in groups)
        return StepStats(True, {})

    def _end_of_step(self, groups: list[Group], seconds: float) -> float:
        """When its passes and the optimizer's move are over: each part begins when its last group has finished, the
        part before is over, and the weights of the step before serve.
        """
        ready = sorted(self.finished.pop(group.id) for group in groups)
        if self.world.parts == 1:
            return self.clock.time() + seconds
        each, end = (seconds - self.world.fixed) / len(ready), self.trainer_free
        for i in range(self.world.parts):
            part = ready[i * len(ready) // self.world.parts : (i + 1) * len(ready) // self.world.parts]
            end = max([end, *part[-1:]]) + each * len(part)
        return end + self.world.fixed

    async def sync(self, trainer: Any, engine: Any) -> int:
        """The engines go on while weights are on their way, and stand still for the rest."""
        began = self.clock.time()
        w = self.world
        await asyncio.sleep(w.sync - min(w.pause, w.sync))
        if not w.shared:
            await self.pool.pause(w.in_flight, w.prompt)
            await asyncio.sleep(w.pause)
            self.pool.resume()
        self.trainer_free = self.clock.time()
        self.seen.syncing += self.trainer_free - began
        return self.buffer.version + 1

    async def milestone(self, step: int, version: int, batch: Any) -> None:
        """At the end of the first steps counting begins; at the end of the last one it ends."""
        if step == self.before:
            self.seen = SimulatedCounts()
            self._began = (self.clock.time(), *self.pool.usage_totals(), self.pool.failures)
        elif step == self.before + self.steps:
            at, filled, places, busy, failures = self._began
            now = self.pool.usage_totals()
            self.seen.steps, self.seen.seconds = self.steps, self.clock.time() - at
            self.seen.filled, self.seen.places = now[0] - filled, now[1] - places
            self.seen.rollout_busy = now[2] - busy
            self.seen.failures = self.pool.failures - failures

    # -- devices ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        if not self.world.shared:
            yield
            return
        await self.pool.pause(self.world.in_flight, self.world.prompt)
        yield
        self.pool.resume()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield
