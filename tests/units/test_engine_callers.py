"""Callers of the engine that go away, and a step that breaks: no page is lost, nobody else notices or all are told."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kits.engine import all_of, ask, engine, idle, inline, prompt, tiny
from kits.sweeps import covering
from kits.sync import Publisher, updater, wrote
from rondel.core.errors import EngineError


@pytest.mark.slow
@pytest.mark.parametrize("after", covering([0, 1, 3, 8], [0, 3]))
def test_a_cancelled_caller_leaves_no_page(after):
    async def main():
        e = engine(tiny(), max_running=3)
        tasks = [asyncio.create_task(e.generate(ask(prompt(1, 30), key=i, n=30))) for i in range(5)]
        if after:
            await wrote(e, after)
        else:
            await asyncio.sleep(0)
        for t in (tasks[0], tasks[3]):
            t.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(d, asyncio.CancelledError) for d in done] == [True, False, False, True, False]
        for _ in range(4):
            await asyncio.sleep(0)
        idle(e)
        return [d.tokens for d in done if not isinstance(d, BaseException)]

    alone = [asyncio.run(engine(tiny()).generate(ask(prompt(1, 30), key=i, n=30))).tokens for i in (1, 2, 4)]
    assert asyncio.run(main()) == alone


@pytest.mark.slow
def test_callers_that_leave_while_the_device_computes():
    """The device thread reads a request's pages; a caller that leaves in that moment must not pull them away."""
    model, pool = tiny(), ThreadPoolExecutor(1)
    requests = [ask(prompt(i, 15), key=i, n=30) for i in range(12)]
    free = asyncio.run(all_of(engine(model), requests))

    async def on_thread(f, *args):
        def slow():
            time.sleep(0.001)
            return f(*args)

        return await asyncio.get_running_loop().run_in_executor(pool, slow)

    async def main():
        e = engine(model, run=on_thread)
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        for i in range(0, 12, 2):
            await asyncio.sleep(0.004)
            tasks[i].cancel()
        scored = await e.score(ask(prompt(0, 20)))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        idle(e)
        assert (await e.status()).state == "serving" and len(scored.logprobs) == 20
        return done

    done = asyncio.run(main())
    assert [done[i].tokens for i in range(1, 12, 2)] == [free[i].tokens for i in range(1, 12, 2)]
    pool.shutdown()


@pytest.mark.slow
def test_a_pause_that_is_given_up_leaves_the_step_alone():
    model, request = tiny(), ask(prompt(1, 10), key=1, n=30)

    async def main():
        gate = asyncio.Event()

        async def gated(f, *args):
            await gate.wait()
            return f(*args)

        e = engine(model, run=gated)
        task = asyncio.create_task(e.generate(request))
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(e.pause("hold"), 0.02)
        gate.set()
        await e.resume()
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(main()).tokens == asyncio.run(engine(model).generate(request)).tokens


@pytest.mark.slow
def test_a_broken_step_tells_everyone_and_caches_nothing():
    model = tiny()
    trainer = Publisher(model)

    async def main():
        fails = False

        async def run(f, *args):
            if fails:
                raise RuntimeError("out of memory")
            return await inline(f, *args)

        e = engine(model, run=run, max_running=2)
        tasks = [asyncio.create_task(e.generate(ask(prompt(1, 20), key=i, n=30))) for i in range(4)]
        await wrote(e, 3)
        fails = True
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(d, EngineError) and "RuntimeError: out of memory" in str(d) for d in done)
        idle(e)
        assert e.scheduler.caches[0].tree.cached == 0, "pages that no step computed are in the cache"
        fails = False
        with pytest.raises(EngineError, match="its step broke: RuntimeError: out of memory"):
            await e.generate(ask(prompt(1, 20)))
        await updater()(trainer, e)
        return await e.generate(ask(prompt(1, 20), key=1))

    assert asyncio.run(main()).tokens == asyncio.run(engine(model).generate(ask(prompt(1, 20), key=1))).tokens
