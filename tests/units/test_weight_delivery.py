"""Updates beside the trainer's next step: what is delivered is what was published, one at a time, and a fault has a name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from kits.engine import ask, engine, plain_logprobs, prompt, tiny, twin
from kits.fakes import Heard
from kits.runs import check, events, run
from kits.sync import PROBE, Publisher, wrote
from kits.transports import bits, same
from rondel.buffer import Buffer
from rondel.core.errors import StalledError, SyncError, WorkerError
from rondel.core.events import Synced, Warned
from rondel.core.types import Abort, Commit, Route
from rondel.driver.weight_delivery import WeightDelivery
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tcp import FromTcp
from rondel.sync.update import WeightUpdate

MAKE = {"ipc": lambda folder: FromIpc(), "tcp": lambda folder: FromTcp(), "disk": FromDisk, "delta": Delta}


async def in_thread(f, *args):
    return await asyncio.to_thread(f, *args)


def ends(kind, folder):
    """-> (trainer, engine, update) with a probe of 16 tokens."""
    model = tiny()
    trainer = Publisher(twin(model), transport=MAKE[kind](folder))
    e = engine(model, transports={kind: MAKE[kind](folder)}, run=in_thread)

    async def score(tokens):
        return [0.0, *plain_logprobs(trainer.loaded, tokens)]

    return trainer, e, WeightUpdate(trainer.transport, probe=PROBE, score=score, tolerance=1e-4, moved=lambda: True)


def close(trainer, e):
    trainer.transport.close()
    for transport in e.arrivals._transports.values():
        transport.close()


class Healthy:
    """A deployment in which nothing ends, or one engine, found when it is asked for the second time."""

    may_lose_engines = True

    def __init__(self, *, ended: bool = False) -> None:
        self.found = [False, ended]

    async def restart_engines(self) -> bool:
        return self.found.pop(0) if self.found else False

    async def lost(self) -> WorkerError | None:
        return None


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_delivered_is_what_was_published(tmp_path, kind):
    """The trainer has gone on: the engine gets the bits of the version, and is compared with its scores of then."""
    trainer, e, sync = ends(kind, tmp_path)

    async def main():
        for version in (1, 2, 3):
            trainer.train()
            then = {name: t.clone() for name, t in bits(trainer.loaded).items()}
            snapshot = await sync.publish(trainer, e)
            with torch.no_grad():
                for p in trainer.loaded.model.parameters():
                    p.add_(0.5)
            assert e.version == version - 1
            with Heard(Synced) as heard:
                assert await sync.deliver(snapshot) == version == e.version
            assert same(then, bits(e.loaded)) and heard[0].probe_gap < 1e-5
            with torch.no_grad():
                for p, before in zip(trainer.loaded.model.parameters(), then.values(), strict=True):
                    p.copy_(before)

    asyncio.run(main())
    close(trainer, e)


def test_a_failed_delivery_leaves_the_old_version_serving_and_can_be_tried_again(tmp_path):
    trainer, e, sync = ends("ipc", tmp_path)
    receive, heard = e.receive, []

    async def faulty(message):
        heard.append(type(message))
        if isinstance(message, Commit) and heard.count(Commit) == 1:
            raise SyncError("the wire")
        return await receive(message)

    async def main():
        e.receive = faulty
        snapshot = await sync.publish(trainer, e)
        before = bits(e.loaded)
        with pytest.raises(SyncError, match="the wire"):
            await sync.deliver(snapshot)
        assert heard[-1] is Abort and (await e.status()).state == "serving" and sync.root is None
        assert same(before, bits(e.loaded)) and (await e.generate(ask(prompt(1, 9)))).tokens
        assert await sync.deliver(snapshot) == 0 and sync.root == snapshot.manifest.root

    asyncio.run(main())
    close(trainer, e)


def test_weights_that_move_over_those_that_serve_are_not_published_apart():
    sync = WeightUpdate(SimpleNamespace(holds="begin"), probe=[], score=None, tolerance=1e-4)
    assert not sync.keeps_snapshots
    with pytest.raises(AssertionError, match="begin"):
        asyncio.run(sync.publish(None))


class Slow:
    """An update whose deliveries end when they are told to."""

    keeps_snapshots = True

    def __init__(self, *faults: Exception | None) -> None:
        self.version, self.faults, self.log = 0, list(faults), []
        self.let = asyncio.Event()

    async def publish(self, trainer, engine):
        self.version += 1
        self.log.append(f"publish {self.version}")
        return SimpleNamespace(manifest=SimpleNamespace(version=self.version))

    async def deliver(self, snapshot) -> int:
        await self.let.wait()
        fault = self.faults.pop(0) if self.faults else None
        self.log.append(f"{'fail' if fault else 'deliver'} {snapshot.manifest.version}")
        if fault:
            raise fault
        return snapshot.manifest.version

    def fall_back(self, error) -> bool:
        return False

    def makes_good(self, snapshot, error) -> bool:
        return False

    async def __call__(self, trainer, engine) -> int:
        return await self.deliver(await self.publish(trainer, engine))


def test_one_delivery_at_a_time_and_groups_are_born_at_what_serves():
    async def main():
        update, buffer = Slow(), Buffer(groups_per_step=2, max_staleness=1)
        delivery = WeightDelivery(update, Healthy())
        assert await delivery.start(None, None, buffer) == 1
        await buffer.advance(1)
        assert (buffer.version, buffer.birth_version) == (1, 0)
        second = asyncio.create_task(delivery.start(None, None, buffer))
        waits = asyncio.create_task(delivery.finish(None, None))
        await asyncio.sleep(0.01)
        assert update.log == ["publish 1"] and not waits.done()
        update.let.set()
        assert await second == 2
        await waits
        assert update.log[:3] == ["publish 1", "deliver 1", "publish 2"]
        await buffer.advance(2)
        await delivery.finish(None, None)
        assert buffer.birth_version == 2
        assert await delivery.update_engines(None, None) == 3 and update.log[-2:] == ["publish 3", "deliver 3"]

    asyncio.run(main())


@pytest.mark.parametrize("healed", [True, False])
def test_an_engine_that_ends_meanwhile_gets_the_same_snapshot_again_or_the_run_ends_by_name(healed):
    async def main():
        update, buffer = Slow(WorkerError("engine-0 ended")), Buffer(groups_per_step=2, max_staleness=1)
        delivery = WeightDelivery(update, Healthy(ended=healed))
        update.let.set()
        await delivery.start(None, None, buffer)
        if healed:
            await delivery.finish(None, None)
            assert update.log == ["publish 1", "fail 1", "deliver 1"] and not delivery.broken.is_set()
            return
        async with asyncio.timeout(5):
            await delivery.broken.wait()
        for work in (lambda: delivery.finish(None, None), lambda: delivery.start(None, None, buffer)):
            with pytest.raises(WorkerError, match="engine-0 ended") as error:
                await work()
        assert error.value.__notes__[0] == "while version 1 was delivered beside the next step"
        await delivery.cancel()

    asyncio.run(main())


@pytest.mark.slow
def test_a_run_goes_on_while_its_engine_fetches_weights(tmp_path):
    """Lag, stamps and versions are exact, and evaluations and checkpoints wait for the engine."""
    stale = {"algo__correction": {"kind": "importance"}, "loop__max_staleness": 2, "loop__warmup__steps": 0}
    card = run(tmp_path, place__kind="split", loop__steps=7, task__eval__every=3, **stale)
    check(tmp_path, staleness=2, total=7)
    assert card["facts"]["resolved"]["weight_delivery"] == "beside the next step (loop.max_staleness = 2)"
    order = [(e["kind"], e["version"]) for e in events(tmp_path, "Synced") + events(tmp_path, "StepDone")]
    assert [version for kind, version in order if kind == "Synced"] == list(range(8))
    names = ("Synced", "StepDone", "Checkpointed", "Evaluated")
    from rondel.runtime.journal.log import read

    story = [(e["kind"], e["version"]) for e in read(tmp_path) if e["kind"] in names]
    served = 0
    for kind, version in story:
        served = version if kind == "Synced" else served
        assert kind not in ("Checkpointed", "Evaluated") or served == version, story
    assert any(story.index(("StepDone", v)) < story.index(("Synced", v)) for v in range(1, 8)), "none was overlapped"


def test_a_route_of_what_was_published_stays_readable_after_the_next_step(tmp_path):
    """Two segments take turns: one engine may still read the version before while the trainer writes the next."""
    trainer, e, sync = ends("ipc", tmp_path)

    async def main():
        await sync(trainer, e)
        trainer.train()
        first = await sync.publish(trainer, e)
        trainer.train()
        other = trainer.transport.publish(Route("ipc"), 2, [])
        assert await sync.deliver(first) == 1 and other[1].data.path != first.route.data.path

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.slow
def test_an_engine_that_comes_late_gets_whole_weights_where_changes_travel(tmp_path):
    trainer, e, sync = ends("delta", tmp_path)
    fresh = engine(tiny(), transports={"delta": Delta(tmp_path)}, run=in_thread)

    async def main():
        for version in (1, 2):
            trainer.train(1e-4)
            assert await sync(trainer, e) == version
        assert await sync.catch_up(fresh) == 2 == fresh.version and same(bits(fresh.loaded), bits(trainer.loaded))
        trainer.train(1e-4)
        assert await sync(trainer, e, fresh) == 3 == fresh.version == e.version

    asyncio.run(main())
    close(trainer, e)


def test_changes_that_find_no_base_beside_a_step_are_made_good_by_the_next_update(tmp_path):
    """The engine ended after the publication: whoever takes its place has nothing that could be changed."""
    trainer, e, sync = ends("delta", tmp_path)
    buffer, delivery, deliver = (
        Buffer(groups_per_step=2, max_staleness=2),
        WeightDelivery(sync, Healthy()),
        sync.deliver,
    )

    async def late(snapshot):
        e.arrivals.root = ""
        return await deliver(snapshot)

    async def main():
        trainer.train(1e-4)
        assert await delivery.update_engines(trainer, e) == 1
        sync.deliver = late
        trainer.train(1e-4)
        with Heard(Warned) as warned:
            assert await delivery.start(trainer, e, buffer) == 2
            await buffer.advance(2)
            await delivery.finish(trainer, e)
        assert len(warned) == 1 and "version 2 has not reached the engines" in warned[0].message
        assert (e.version, buffer.birth_version) == (2, 2) and same(bits(e.loaded), bits(trainer.loaded))

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.parametrize("again", ["refused", "taken"])
def test_a_step_behind_a_lost_delivery_is_compared_with_what_was_published(tmp_path, again):
    """Version 2 moved and reached nobody. The step behind it is refused, or moves nothing although it says so."""
    trainer, e, sync = ends("delta", tmp_path)
    buffer, delivery, deliver = (
        Buffer(groups_per_step=2, max_staleness=2),
        WeightDelivery(sync, Healthy()),
        sync.deliver,
    )
    moved = True
    sync.moved = lambda: moved

    async def late(snapshot):
        e.arrivals.root = ""
        return await deliver(snapshot)

    async def main():
        nonlocal moved
        trainer.train(1e-4)
        assert await delivery.update_engines(trainer, e) == 1
        sync.deliver = late
        trainer.train(1e-4)
        assert await delivery.start(trainer, e, buffer) == 2
        await buffer.advance(2)
        await asyncio.wait([delivery._running])
        trainer.version, moved = 3, again == "taken"
        if moved:
            with pytest.raises(SyncError, match="bit for bit the old ones"):
                await delivery.update_engines(trainer, e)
        else:
            assert await delivery.update_engines(trainer, e) == 3 == e.version
            assert same(bits(e.loaded), bits(trainer.loaded))

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.parametrize("kind", ["ipc", "tcp", "disk"])
def test_an_engine_that_is_started_again_in_the_middle_of_an_update_gets_weights(tmp_path, kind):
    """Ranks that serve their own shards hold what they published last, and nothing older."""
    trainer, e, sync = ends(kind, tmp_path)
    fresh = engine(tiny(), transports={kind: MAKE[kind](tmp_path)}, run=in_thread)

    async def main():
        trainer.train()
        assert await sync(trainer, e) == 1
        trainer.train()
        snapshot = await sync.publish(trainer, e, fresh)
        assert await sync.catch_up(fresh) == 2 == fresh.version and same(bits(fresh.loaded), bits(trainer.loaded))
        assert await sync.deliver(snapshot) == 2 == e.version == fresh.version

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.parametrize("ends_ever", [True, False])
def test_answers_that_are_ended_before_an_update_have_the_time_that_they_take(ends_ever):
    """`loop.in_flight = "drain"`: the deadline is for an engine that does not move, not for long answers."""
    model, trainer = tiny(), Publisher(twin(tiny()), transport=FromIpc())
    stuck = asyncio.Event()

    async def slow(f, *args):
        if not ends_ever and e.scheduler.running and e.scheduler.running[0].written > 20:
            await stuck.wait()
        await asyncio.sleep(0.003)
        return f(*args)

    e = engine(model, transports={"ipc": FromIpc()}, run=slow)
    sync = WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, deadline=0.15, how="drain")

    async def main():
        trainer.train()
        asked = asyncio.create_task(e.generate(ask(prompt(1, 9), n=150)))
        await wrote(e, 2)
        if ends_ever:
            assert await sync(trainer, e) == 1
            assert set((await asked).versions) == {0} and len(asked.result().tokens) == 150
        else:
            with pytest.raises(StalledError, match="no answer to a pause"):
                await sync(trainer, e)
            asked.cancel()
            stuck.set()

    asyncio.run(main())
    close(trainer, e)
