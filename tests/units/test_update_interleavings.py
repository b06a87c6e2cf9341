"""Law 6 in every order: one weight update of two engines, all messages, device steps, lost messages, lost answers and
cancellations in every order in which they can happen (kits/interleavings.py). Real are `WeightUpdate`, `EngineUpdate`,
`WeightReceiver` and `EngineLifecycle`; the model has two weights of one number each, which are equal within a version.

At every state:  an engine that serves has all weights of one version, and it is the one whose number it says.
At the end:      the update succeeded, and all serve it; or it failed, and those that serve serve one version.
Afterwards:      the next update succeeds, and all serve.
"""

from __future__ import annotations

import asyncio

import pytest

from kits.interleavings import Violation, explore, settle
from kits.small_updates import SmallEngine, SmallTrainer
from rondel.core.errors import EngineError, SyncError
from rondel.generate.engine.builtin import weight_receiver
from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import LEASE, EngineMessages, WeightUpdate


def one_update(holds, *, engines=2, messages=EngineMessages):

    async def scenario(world):
        transport = FromTensor()
        transport.holds = holds
        trainer = SmallTrainer(world, transport)
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
