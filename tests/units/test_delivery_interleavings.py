"""Deliveries beside the trainer's next step, and the way that weights take, in every order (kits/interleavings.py). Real are
`WeightDelivery`, `WeightUpdate`, `TransportChoice` and an engine's parts; two ways carry the two weights of a small model.

At every state:  the engine serves all weights of one version, and none older than that at which rollouts are admitted.
At the end:      the run went through, and the engine serves what was trained last; or it has failed, said so, and the engine
                 serves one version.
A fault on the way, of publishing, sending or reading, ends no run: the weights take the other way.
"""

from __future__ import annotations

import asyncio

import pytest

from kits.interleavings import Violation, explore, settle
from kits.small_updates import SmallEngine, SmallTrainer
from rondel.core.errors import EngineError, SyncError
from rondel.core.types import Manifest, Route
from rondel.driver.weight_delivery import WeightDelivery
from rondel.generate.engine.builtin import weight_receiver
from rondel.sync.choice import TransportChoice
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import LEASE, WeightUpdate

STEPS = 2
ON_THE_WAY = ("the trainer publishes", "the trainer sends", "engine 0 <- route")


class Way(FromTensor):
    """Of a kind of its own."""

    def __init__(self, kind, holds):
        super().__init__()
        self.kind, self.holds = kind, holds

    async def plan_route(self, trainer, engines):
        return Route(self.kind)

    def publish(self, route, version, weights):
        manifest, made = super().publish(route, version, weights)
        return Manifest(version, manifest.tensors), Route(self.kind, made.data)


class PublishingTrainer(SmallTrainer):
    """Whose publication may fail, and fails from then on by the same way, and whose steps take time."""

    def __init__(self, world, transport):
        super().__init__(world, transport)
        self.gone = set()

    async def publish(self, route):
        if await self.world.step("the trainer publishes", "fails"):
            self.gone.add(route.kind)
        if route.kind in self.gone:
            raise SyncError("shared memory is gone")
        return await super().publish(route)

    async def step(self):
        await self.world.step("the trainer steps")
        self.train()


class Serves:
    """What the buffer knows of the version that engines serve (buffer/buffer.py)."""

    def __init__(self):
        self.version, self.serving = 1, None

    def begin_delivery(self):
        assert self.serving is None, "two deliveries at a time"
        self.serving = self.version

    def end_delivery(self):
        self.serving = None

    @property
    def born(self):
        """At which version rollouts are admitted."""
        return self.version if self.serving is None else self.serving


class Unhurt:
    """A deployment of which no process ends."""

    may_lose_engines = False

    async def restart_engines(self):
        return False

    async def lost(self):
        return None


def deliveries(first, second, *, delivers=WeightDelivery, choice=TransportChoice):
    """A run of STEPS steps whose weights go by `first`, and where that fails by `second`."""

    async def scenario(world):
        ways = {"a": Way("a", first), "b": Way("b", second)}
        trainer, buffer = PublishingTrainer(world, TransportChoice(ways)), Serves()
        engine = SmallEngine(world, "engine 0", ways)
        update = WeightUpdate(choice(ways), probe=[], score=None, tolerance=1e-4, moved=lambda: True)
        delivery = delivers(update, Unhurt())

        def stale():
            old = engine.state == "serving" and engine.version < buffer.born
            return f"rollouts are admitted at {buffer.born}, and the engine serves {engine.version}" if old else ""

        world.invariants += [engine.torn, stale]
        world.facts += [
            engine.fact,
            lambda: (trainer.version, buffer.version, buffer.serving, tuple(update.transport.order)),
            lambda: (delivery._missed is None, delivery._running is None or delivery._running.done()),
        ]

        async def run():
            for _ in range(STEPS):
                await trainer.step()
                buffer.version = await delivery.start(trainer, engine, buffer)
            await delivery.finish(trainer, engine)

        try:
            try:
                await world.cancellable(run())
            except asyncio.CancelledError:
                await delivery.cancel()  # as a run that ends does, also where the explorer leaves a path
                raise
        except (EngineError, SyncError, asyncio.CancelledError) as error:
            fatal = [name for name in world.struck if not name.startswith(ON_THE_WAY)]
            once = sum(bool(fault) for _, fault in world.happened) < 2
            stopped = ("the update", "cancelled") in world.happened
            assert fatal or stopped or not once, f"a fault on the way ended the run: {error}"
        else:
            found = (delivery.broken.is_set(), buffer.born, engine.state, engine.version)
            assert found == (False, 1 + STEPS, "serving", 1 + STEPS), f"the run went through, and {found}"
        world.let_all_happen()
        await delivery.cancel()
        await settle()
        if any("resume" in step for step in world.struck):  # a lost resumption is what leases are for
            asyncio.get_running_loop().now += LEASE + 1
            await settle()
        trainer.gone.clear()  # whoever runs it has mended the way
        trainer.train()
        assert await update(trainer, engine) == trainer.version == engine.version, "the next update"

    return scenario


@pytest.fixture(autouse=True)
def a_tensor_at_a_time(monkeypatch):
    """The device is free between any two tensors."""
    monkeypatch.setattr(weight_receiver, "SLICE", -1.0)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("commit", "commit"), ("commit", "begin"), ("begin", "commit")])
def test_deliveries_hold_in_every_order_with_one_fault(ways):
    found = explore(deliveries(*ways), faults=1)
    assert len(found.states) > 250 and found.ends > 70


@pytest.mark.slow
def test_deliveries_hold_in_every_order_with_two_faults():
    """Both ways may be gone then, which ends the run."""
    assert len(explore(deliveries("commit", "begin"), faults=2).states) > 1000


class EndsWhatItMissed(WeightDelivery):
    """A planted bug: a delivery that failed counts as done for admissions."""

    async def _deliver(self, snapshot, buffer):
        await super()._deliver(snapshot, buffer)
        if self._missed is not None:
            buffer.end_delivery()


class WaitsForNothing(WeightDelivery):
    """A planted bug: the next delivery begins while one is under way."""

    async def _wait(self):
        if self._missed is not None:
            await super()._wait()


class AsksTooEarly(WeightDelivery):
    """A planted bug: which way the weights go is looked at before the delivery that may change it has ended."""

    async def start(self, trainer, engine, buffer):
        keeps = self.update.keeps_snapshots
        await self._wait()
        if not keeps or self._missed is not None:
            return await self.update_engines(trainer, engine)
        snapshot = await self._repeat_healed(lambda: self.update.publish(trainer, engine))
        buffer.begin_delivery()
        self._running = asyncio.create_task(self._deliver(snapshot, buffer), name="delivery")
        return snapshot.manifest.version


class StaysOnItsWay(TransportChoice):
    """A planted bug: it says that another way is taken, and goes on by the one that failed."""

    def fall_back(self):
        if len(self.order) < 2:
            return None
        self.order.pop()
        return self.order[0], self.order[0]


@pytest.mark.parametrize(
    "planted, why",
    [
        (EndsWhatItMissed, "rollouts are admitted at 3, and the engine serves 2"),
        (WaitsForNothing, "the run went through, and"),
        (AsksTooEarly, "begin, after"),
        (StaysOnItsWay, "a fault on the way ended the run"),
    ],
)
def test_a_planted_bug_is_found(planted, why):
    how = {"choice": planted} if planted is StaysOnItsWay else {"delivers": planted}
    with pytest.raises(Violation, match=why):
        explore(deliveries("commit", "begin", **how), faults=1)
