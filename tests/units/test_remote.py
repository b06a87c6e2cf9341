"""An engine elsewhere that ends: its requests are asked again of the next one, an update is not."""

from __future__ import annotations

import asyncio

import pytest

from kits.remote import Trainer, Transport, Worker, deployed, made, zeros
from rondel.buffer import Buffer
from rondel.core.errors import EngineError, SyncError, WorkerError
from rondel.core.types import Request, Sampling
from rondel.driver.weight_delivery import WeightDelivery
from rondel.generate.engine.resumption import generate_until_done
from rondel.sync.update import WeightUpdate


def test_a_request_is_asked_again_of_the_next_engine():
    engine, _, started = made("generate")
    assert asyncio.run(engine.generate(Request([1], Sampling(max_tokens=1)))).tokens == [1]
    assert len(started) == 1 == engine.restarts


@pytest.mark.parametrize("verb", ["status", "Begin", "pause", "Commit", "resume", "score"])
def test_an_engine_that_ends_in_an_update_ends_the_update(verb):
    """At once, whatever it was asked for: one that mended it would wait for the update, that is for itself."""
    engine, update, started = made(verb)

    async def work() -> None:
        with pytest.raises((WorkerError, SyncError)):
            await asyncio.wait_for(update(Trainer(), engine), 5)
        assert not started
        assert await asyncio.wait_for(engine.restart_if_dead(), 5) and len(started) == 1
        assert await asyncio.wait_for(update(Trainer(), engine), 5) == 1

    asyncio.run(work())


async def ask_until(over: asyncio.Event, generate) -> int:
    """One lane of a run: a request after the other. -> how many were answered."""
    done = 0
    while not over.is_set():
        answer = await generate_until_done(generate, Request([1], Sampling(max_tokens=6)))
        assert len(answer.tokens) == len(answer.versions) == 6
        done += 1
    return done


VERBS = ["generate", "status", "Begin", "Route", "pause", "Commit", "resume", "score", "Abort"]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_ends_at_any_moment_is_waited_for(engines, verb, late):
    """Requests wait for it or go to the other one, the update is made again, and then all engines serve its version."""

    async def work(holds: str, how: str, nth: int, beside: bool) -> None:
        update = WeightUpdate(
            Transport(holds), probe=[1], score=zeros, tolerance=1e-3, moved=lambda: True, deadline=5.0, how=how
        )
        placed, trainer, over = deployed(Worker(verb, nth, late=late), engines, update), Trainer(), asyncio.Event()
        router, delivery = placed.engine, WeightDelivery(update, placed)
        buffer = Buffer(groups_per_step=1, max_staleness=1)
        assert await delivery.update_engines(trainer, router) == 1
        lanes = [asyncio.create_task(ask_until(over, router.generate)) for _ in range(6)]
        for version in (2, 3, 4):
            for _ in range(10):
                await asyncio.sleep(0)
            trainer.version = version
            if beside:
                assert await delivery.start(trainer, router, buffer) == version
            else:
                assert await delivery.update_engines(trainer, router) == version
        await delivery.finish(trainer, router)
        over.set()
        assert min(await asyncio.gather(*lanes)) > 0
        assert [remote.restarts for remote in placed.remotes.values()] == [1, 0][:engines]
        assert set(router.replicas) == set(placed.remotes) and not router.lost and router.version == 4
        assert [r._worker.version for r in placed.remotes.values()] == [4] * engines
        assert not any(replica.load or replica.fault for replica in router.replicas.values())

    for holds in ("commit", "begin"):
        for how in ("hold", "abort"):
            for beside in {False, holds == "commit"}:
                nth = {"generate": 20, "Abort": 1}.get(verb, 2)
                asyncio.run(asyncio.wait_for(work(holds, how, nth, beside), 10))


@pytest.mark.parametrize("verb", ["status", "score", "pause", "resume", "sleep", "wake"])
def test_an_engine_that_ends_outside_of_updates_is_waited_for(verb):
    """Nobody makes an update that would find it: who asked is told, and the router sees to it that it comes back."""

    async def work() -> None:
        update = WeightUpdate(Transport(), probe=[], score=zeros, tolerance=1e-3)
        placed = deployed(worker := Worker(), 1, update)
        router = placed.engine
        assert await WeightDelivery(update, placed).update_engines(Trainer(), router) == 1
        if verb in ("resume", "wake"):
            await (router.pause() if verb == "resume" else router.sleep(("kv_cache",)))
        worker.at = verb
        given = {"score": (Request([1]),), "sleep": (("kv_cache",),), "wake": (("kv_cache",),)}.get(verb, ())
        with pytest.raises(EngineError, match=r"engine-0: WorkerError: .*it is started again"):
            await getattr(router, verb)(*given)
        if verb == "pause":  # as every caller of it does
            with pytest.raises(EngineError):
                await router.resume()
        if verb == "sleep":
            with pytest.raises(EngineError):
                await router.wake(("kv_cache",))
        answer = await router.generate(Request([1], Sampling(max_tokens=2)))
        assert answer.versions == [1, 1] and placed.remotes["engine-0"].restarts == 1 and not router.lost

    asyncio.run(asyncio.wait_for(work(), 10))


def test_an_engine_that_cannot_be_started_again_is_an_error_with_its_cause():
    """To those who wait, and to those who come later."""

    async def work() -> None:
        update = WeightUpdate(Transport(), probe=[], score=zeros, tolerance=1e-3)
        placed = deployed(worker := Worker(), 1, update)
        router, remote = placed.engine, placed.remotes["engine-0"]
        assert await WeightDelivery(update, placed).update_engines(Trainer(), router) == 1
        remote._start = lambda: Worker("Begin")
        worker.fate = "worker engine-0 was ended by SIGKILL"
        with pytest.raises(EngineError, match="no engine is left"):
            await router.status()
        for _ in range(2):
            with pytest.raises(EngineError, match=r"no engine is left: engine-0: EngineError: an engine ended 6 times"):
                await router.generate(Request([1]))
        with pytest.raises(EngineError, match="an engine ended 6 times"):
            await placed.restart_engines()

    asyncio.run(asyncio.wait_for(work(), 10))
