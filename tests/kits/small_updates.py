"""A trainer and engines for the model checker (kits/interleavings.py): the real parts of a weight update over two weights of
one number each, which are equal within a version.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch

from rondel.core.errors import EngineError, SyncError
from rondel.core.types import EngineStatus
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.builtin.lifecycle import EngineLifecycle, EngineUpdate, StepTask
from rondel.generate.engine.builtin.serving_loop import ServingLoop
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.models import names


class TwoWeights(torch.nn.Module):
    """Both have the number of their version."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(2))

    @property
    def numbers(self):
        return self.a.item(), self.b.item()


class SmallTrainer:
    def __init__(self, world, transport):
        self.world, self.model, self.version, self.transport = world, TwoWeights(), 1, transport

    def train(self):
        self.version += 1
        for weight in self.model.parameters():
            weight.data = torch.full((1,), float(self.version))

    async def publish(self, route):
        return self.transport.publish(route, self.version, names.describe_tensors(names.named_weights(self.model)))

    async def send(self, route):
        if await self.world.step("the trainer sends", "fails"):
            raise SyncError("the trainer cannot send")


class SmallEngine:
    """The real parts of an engine's update. It decodes whenever it may: a step is under way until a pause waits for it."""

    def __init__(self, world, name, transports=None):
        self.world, self.name, self.model, self.steps = world, name, TwoWeights(), True
        self._ending = None
        self.arrivals = WeightReceiver(SimpleNamespace(model=self.model), transports or {})
        self.lifecycle = EngineLifecycle(1, lambda: self.arrivals.is_overwriting)
        engine = self

        class Serving:
            scheduler = SimpleNamespace(
                drop_cache=lambda version: None,
                new_version=lambda version, before: None,
                is_behind=lambda version: False,
            )
            runner = SimpleNamespace(loaded=SimpleNamespace(sight=None), draft=None)
            log = SimpleNamespace(record_version=lambda version, root: None)

            @property
            def is_busy(self):
                return engine.steps

            @property
            def has_stopped(self):
                return not engine.steps

            async def wait_for_task(self):
                await engine._end_step()

            wait_until_stopped = StepTask.wait_until_stopped  # the loop's waits for pictures, too
            follow_weights = ServingLoop.follow_weights

            def update_account(self): ...

            def report_version(self): ...

            async def run(self, work, *inputs):
                await engine.world.step(f"{engine.name}: {work.__name__.strip('_')}")
                return work(*inputs)

            def wake_up(self):
                engine.steps = engine.steps or engine.lifecycle.state == "serving"

        self.serving, self.scheduler = Serving(), Serving.scheduler
        self.update = EngineUpdate(self.arrivals, self.lifecycle, self.serving)

    state = property(lambda self: self.lifecycle.state)
    version = property(lambda self: self.lifecycle.version)

    async def _ask(self, what, do):
        """A message to it and its answer, of which either may be lost."""
        fault = await self.world.step(f"{self.name} <- {what}", "lost", "answer lost")
        if fault == "lost":
            raise EngineError(f"{self.name} does not answer")
        answer = await do()
        if fault:
            raise EngineError(f"{self.name} did, and its answer is lost")
        return answer

    async def receive(self, message):
        async def do():
            try:
                await self.update.receive(message)
            finally:
                if self.lifecycle.state != "serving":
                    self._end_step()
            return self.lifecycle.version

        return await self._ask(type(message).__name__.lower(), do)

    def _end_step(self):
        """It begins no other one; the one under way ends when the world lets it."""

        async def end():
            if self.steps:
                await self.world.step(f"{self.name} ends its step")
                self.steps = False

        if self._ending is None or self._ending.done():
            self._ending = asyncio.ensure_future(end())
        return asyncio.shield(self._ending)

    async def status(self):
        return EngineStatus(self.lifecycle.version, self.lifecycle.state, 1, 0, 0, 0, 0, 0)

    async def pause(self, how, lease):
        await self._ask("pause", lambda: BuiltinEngine.pause(self, how, lease))

    async def resume(self):
        await self._ask("resume", lambda: BuiltinEngine.resume(self))

    def torn(self):
        """What the requests that it decodes would read, if it is not its version."""
        if (self.steps or self.lifecycle.state == "serving") and set(self.model.numbers) != {self.lifecycle.version}:
            return f"{self.name} serves {self.model.numbers} as version {self.lifecycle.version}"
        return ""

    def fact(self):
        life, came = self.lifecycle, self.arrivals
        return (
            life.version, life.state, bool(life.broken), life.held, self.steps, self.model.numbers, came._untouched,
            came._begun is None, came._came, len(came._awaited), tuple(sorted(came.staged.tensors)),
        )  # fmt: skip
