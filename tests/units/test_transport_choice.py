"""`sync.kind = "auto"` between processes: the fastest way by what each moved, and the next one where it fails."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kits.engine import ask, engine, plain_logprobs, prompt, tiny, twin
from kits.fakes import Heard
from kits.sync import PROBE, Publisher
from kits.transports import Broken, bits, same
from rondel.buffer import Buffer
from rondel.core.errors import SyncError
from rondel.core.events import Warned
from rondel.driver.weight_delivery import WeightDelivery
from rondel.planner.resolve import transport_ways
from rondel.sync import choice
from rondel.sync.choice import SampleEnd, TransportChoice, measure_ways, order_ways
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.update import WeightUpdate


class Nothing:
    """A deployment in which no process has ended."""

    may_lose_engines = False

    async def restart_engines(self):
        return False

    async def lost(self):
        return None


def ends(trainers, engines):
    """-> (trainer, engine, update, delivery) over these ways, the first of them first."""
    model = tiny()
    trainer = Publisher(twin(model), transport=TransportChoice(trainers))
    e = engine(model, transports=engines, run=lambda f, *args: asyncio.to_thread(f, *args))

    async def score(tokens):
        return [0.0, *plain_logprobs(trainer.loaded, tokens)]

    update = WeightUpdate(
        TransportChoice(trainers), probe=PROBE, score=score, tolerance=1e-4, moved=lambda: True, deadline=20.0
    )
    assert update.has_ways
    return trainer, e, update, WeightDelivery(update, Nothing())


def close(trainer, e):
    for way in (trainer.transport, *e.arrivals._transports.values()):
        way.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["publish", "receive"])
def test_what_fails_goes_another_way_and_nothing_is_lost(tmp_path, end):
    broken = partial(Broken, **{f"{end}es" if end == "publish" else "receives": 2})
    trainer, e, update, delivery = ends(
        {"ipc": broken(), "disk": FromDisk(tmp_path)}, {"ipc": broken(), "disk": FromDisk(tmp_path)}
    )

    async def main():
        with Heard(Warned) as warned:
            for version in range(1, 6):
                trainer.train()
                assert await delivery.update_engines(trainer, e) == version == e.version
                assert same(bits(trainer.loaded), bits(e.loaded))
                assert (await e.generate(ask(prompt(1, 9)))).versions[-1] == version
        said = f"weights cannot travel by ipc (shared memory is gone: {end}); from now on they go by disk"
        assert [event.message for event in warned] == [said]
        assert update.transport.order == ["disk"] and [p.name for p in tmp_path.glob("v-*")]

    asyncio.run(main())
    close(trainer, e)


def test_a_way_that_broke_over_the_weights_is_made_good_by_another(tmp_path):
    """Broadcast writes over what serves: half of it came, the engine refuses, and the next way brings it back."""

    class Half(FromDistributed):
        def receive(self, route, manifest, mine):
            for number, row in enumerate(super().receive(route, manifest, mine)):
                if number == 3:
                    raise SyncError("the network is gone")
                yield row

    trainer, e, _, delivery = ends(
        {"distributed": FromDistributed(bucket=20_000, deadline=10.0), "disk": FromDisk(tmp_path)},
        {"distributed": Half(bucket=20_000, deadline=10.0), "disk": FromDisk(tmp_path)},
    )

    async def main():
        trainer.train()
        with Heard(Warned) as warned:
            assert await delivery.update_engines(trainer, e) == 1 == e.version
        assert len(warned) == 1 and "weights cannot travel by distributed" in warned[0].message
        assert same(bits(trainer.loaded), bits(e.loaded)) and (await e.status()).state == "serving"

    asyncio.run(main())
    close(trainer, e)


def test_the_last_way_that_fails_is_the_error(tmp_path):
    trainer, e, _, delivery = ends({"ipc": Broken(publishes=0), "disk": FromDisk(tmp_path)}, {"ipc": FromIpc()})
    trainer.train()
    with pytest.raises(SyncError, match="weights come by 'disk'; this engine takes them by"):
        e.arrivals._transports.pop("disk", None)
        asyncio.run(delivery.update_engines(trainer, e))
    assert e.version == 0
    close(trainer, e)


def test_what_no_other_way_could_carry_is_an_error_at_once(tmp_path):
    """The engine computes something else: that is not the transport's fault."""
    trainer, e, update, delivery = ends(
        {"ipc": FromIpc(), "disk": FromDisk(tmp_path)}, {"ipc": FromIpc(), "disk": FromDisk(tmp_path)}
    )
    e.loaded.head.scale = 1.01
    with Heard(Warned) as warned, pytest.raises(SyncError, match="nats a token on the probe"):
        asyncio.run(delivery.update_engines(trainer, e))
    assert not warned and update.transport.order == ["ipc", "disk"]
    close(trainer, e)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["the next step", "a checkpoint"])
def test_beside_a_step_the_version_after_goes_another_way(tmp_path, then):
    """The trainer has gone on: engines keep the version before, groups are born at it, and get the next that there is."""
    trainer, e, update, delivery = ends(
        {"ipc": FromIpc(), "disk": FromDisk(tmp_path)}, {"ipc": Broken(receives=1), "disk": FromDisk(tmp_path)}
    )
    buffer = Buffer(groups_per_step=2, max_staleness=2)

    async def main():
        for version in (1, 2):
            trainer.train()
            assert await delivery.start(trainer, e, buffer) == version
            await buffer.advance(version)
            await delivery._wait()
        assert (e.version, buffer.version, buffer.birth_version) == (1, 2, 1)
        assert (await e.generate(ask(prompt(1, 9)))).versions[-1] == 1
        if then == "a checkpoint":
            await delivery.finish(trainer, e)
            assert (e.version, buffer.birth_version) == (2, 2) and same(bits(trainer.loaded), bits(e.loaded))
        trainer.train()
        assert await delivery.start(trainer, e, buffer) == 3
        await delivery.finish(trainer, e)
        await buffer.advance(3)
        assert (e.version, buffer.birth_version) == (3, 3) and same(bits(trainer.loaded), bits(e.loaded))
        assert update.transport.order == ["disk"] and not delivery.broken.is_set()

    asyncio.run(main())
    close(trainer, e)


def test_a_publication_that_fails_beside_a_step_waits_if_the_other_way_keeps_nothing():
    ways = [{"ipc": way, "distributed": FromDistributed(deadline=10.0)} for way in (Broken(publishes=1), FromIpc())]
    trainer, e, update, delivery = ends(*ways)
    buffer = Buffer(groups_per_step=2, max_staleness=2)

    async def main():
        for version in (1, 2, 3):
            trainer.train()
            assert await delivery.start(trainer, e, buffer) == version
            await buffer.advance(version)
            await delivery.finish(trainer, e)
            assert (e.version, buffer.birth_version) == (version, version)
        assert update.transport.order == ["distributed"] and same(bits(trainer.loaded), bits(e.loaded))

    asyncio.run(main())
    close(trainer, e)


class HereWorker:
    """An end of a measurement on a thread."""

    def __init__(self) -> None:
        self.end, self.thread = SampleEnd("cpu"), ThreadPoolExecutor(1)

    def ask(self, verb, what, *args):
        assert verb == "sample"
        return self.thread.submit(getattr(self.end, what), *pickle.loads(pickle.dumps(args)))


def test_every_way_is_measured_and_one_that_fails_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "SAMPLE", 1 << 16)
    monkeypatch.setattr(choice, "TENSOR", 1 << 14)
    trainer, worker = HereWorker(), HereWorker()
    ways = {
        "ipc": Broken(receives=1),
        "distributed": FromDistributed(deadline=10.0),
        "disk": FromDisk(tmp_path / "sample"),
    }
    rates, failed = measure_ways(ways, trainer, worker, 20.0)
    assert rates.keys() == {"distributed", "disk"} and min(rates.values()) > 0
    assert failed == {"ipc": "shared memory is gone: receive"}
    assert not trainer.end.ends and not worker.end.ends
    order, why = order_ways(["ipc", "distributed", "disk"], rates, failed)
    assert set(order) == rates.keys() and "ipc failed: shared memory is gone" in why
    for each in (trainer, worker):
        each.thread.shutdown()


def test_the_fastest_comes_first_and_none_is_an_error():
    rates = {"ipc": 2e9, "distributed": 3.5e9, "disk": 1e8}
    assert order_ways(["ipc", "distributed", "disk"], rates, {}) == (
        ["distributed", "ipc", "disk"],
        "measured: distributed 3.50 GB/s, ipc 2.00 GB/s, disk 0.10 GB/s",
    )
    with pytest.raises(SyncError, match="no way for weights between trainer and engine: ipc: a; disk: b"):
        order_ways(["ipc", "disk"], {}, {"ipc": "a", "disk": "b"})
    assert transport_ways("ipc") == ["ipc", "distributed", "disk"]
    assert transport_ways("distributed") == ["distributed", "disk"]
