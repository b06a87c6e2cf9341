"""Law 6 in every order: one weight update of two engines, all messages, device steps, lost messages, lost answers and
cancellations in every order in which they can happen (kits/interleavings.py). Real are `WeightUpdate`, `EngineUpdate`,
`WeightReceiver` and `EngineLifecycle`; the model has two weights of one number each, which are equal within a version.

At every state:  an engine that serves has all weights of one version, and it is the one whose number it says.
At the end:      the update succeeded, and all serve it; or it failed, and those that serve serve one version.
Afterwards:      the next update succeeds, and all serve.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from kits.interleavings import Violation, explore, settle
from rondel.core.errors import EngineError, SyncError
from rondel.core.types import EngineStatus
from rondel.generate.engine.builtin import weight_receiver
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.generate.engine.builtin.lifecycle import EngineLifecycle, EngineUpdate, StepTask
from rondel.generate.engine.builtin.serving_loop import ServingLoop
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.models import names
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import LEASE, EngineMessages, WeightUpdate


class TwoWeights(torch.nn.Module):
    """Both have the number of their version."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(2))

    @property
    def numbers(self):
        return self.a.item(), self.b.item()


class SmallTrainer:
    def __init__(self, world, holds):
        self.world, self.model, self.version = world, TwoWeights(), 1
        self.transport = FromTensor()
        self.transport.holds = holds

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

    def __init__(self, world, name):
        self.world, self.name, self.model, self.steps = world, name, TwoWeights(), True
        self._ending = None
        self.arrivals = WeightReceiver(SimpleNamespace(model=self.model), {})
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


def one_update(holds, *, engines=2, messages=EngineMessages):

    async def scenario(world):
        trainer = SmallTrainer(world, holds)
        served = [SmallEngine(world, f"engine {i}") for i in range(engines)]
        world.invariants += [engine.torn for engine in served]
        world.facts += [engine.fact for engine in served]
        world.alike += [engine.name for engine in served]
        update = WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, moved=lambda: True)
        update.messages = messages(600.0, "hold")
        trainer.train()
        try:
            assert await world.cancellable(update(trainer, *served)) == 2
        except (EngineError, SyncError, asyncio.CancelledError):
            now = [(engine.state, engine.version) for engine in served]
            assert len({version for state, version in now if state == "serving"}) <= 1, f"failed, and engines are {now}"
        else:
            assert all((engine.state, engine.version) == ("serving", 2) for engine in served)
            trainer.train()
        world.let_all_happen()
        await settle()
        if any("resume" in step for step in world.struck):  # a lost resumption is what leases are for
            asyncio.get_running_loop().now += LEASE + 1
            await settle()
        assert await update(trainer, *served) == trainer.version, "the next update"
        now = [(engine.state, engine.version) for engine in served]
        assert now == [("serving", trainer.version)] * engines, f"all are to serve again, and are {now}"

    return scenario


@pytest.fixture(autouse=True)
def a_tensor_at_a_time(monkeypatch):
    """The device is free between any two tensors."""
    monkeypatch.setattr(weight_receiver, "SLICE", -1.0)


@pytest.mark.slow
@pytest.mark.parametrize("holds", ["commit", "begin"])
def test_an_update_holds_in_every_order_with_one_fault(holds):
    found = explore(one_update(holds), faults=1)
    assert len(found.states) > 300


@pytest.mark.slow
@pytest.mark.parametrize("holds", ["commit", "begin"])
def test_an_update_holds_in_every_order_with_two_faults(holds):
    found = explore(one_update(holds, engines=1), faults=2)
    assert len(found.states) > 90


class BelievesInCommits(EngineMessages):
    """A planted bug: a commit that one engine did not acknowledge counts as done."""

    async def gather(self, waits, what):
        if what != "commit":
            return await super().gather(waits, what)
        await asyncio.gather(*waits.values(), return_exceptions=True)
        return [2] * len(waits)


class ResumesWhomItPaused(EngineMessages):
    """A bug that was there: if one engine cannot be paused, those that were stand still until their lease ends."""

    async def pause(self, engines, parked):
        paused = []
        since = await super().pause(engines, paused)
        parked += paused
        return since


@pytest.mark.parametrize(
    "planted, holds",
    [(BelievesInCommits, "commit"), (BelievesInCommits, "begin"), (ResumesWhomItPaused, "commit")],
)
def test_a_planted_bug_is_found(planted, holds):
    with pytest.raises(Violation, match="after\n"):
        explore(one_update(holds, messages=planted), faults=1)


def test_an_engine_that_serves_half_an_update_is_found(monkeypatch):
    """A planted bug: an abort after which the engine believes that its old weights are whole."""
    forget = WeightReceiver.drop_update
    monkeypatch.setattr(WeightReceiver, "drop_update", lambda self: forget(self) or True)
    with pytest.raises(Violation, match=r"engine 0 serves \(2.0, .* as version 1, after\n"):
        explore(one_update("begin", engines=1), faults=1)
