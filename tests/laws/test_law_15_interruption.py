"""Laws 8 and 15: an interrupted sample continues its tokens, and every token says which weights drew it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kits.engine import all_of, ask, engine, idle, inline, plain_logprobs, prompt, tiny, twin
from kits.sync import Publisher, updater, wrote

from rondel.core.errors import EngineError, StalledError, SyncError, UserError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Abort, Begin, Commit, Route
from rondel.models import names


@torch.no_grad()
def replayed(old, new, tokens, kept):
    """log p of tokens[1:] when keys and values of the first `kept` tokens are of the old
    weights, by transformers' own cache.
    """
    for m in (old, new):
        m.model.set_attn_implementation("eager")
    first = old.model(torch.tensor([tokens[:kept]]), use_cache=True)
    second = new.model(torch.tensor([tokens[kept:]]), past_key_values=first.past_key_values, use_cache=True)
    for m in (old, new):
        m.model.set_attn_implementation("rondel")
    logp = torch.cat([first.logits[0], second.logits[0]])[:-1].double().log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("cache", ["kept", "dropped"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_new_weights_in_the_middle_of_a_sample(kind, copied, cache):
    model = tiny(kind) if kind == "llama" else tiny(kind, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    old, trainer = twin(model), Publisher(twin(model) if copied else model)
    requests = [ask(prompt(i, 12 + i), key=i, n=30) for i in range(3)]

    async def main():
        e, sync = engine(model), updater()
        await sync(trainer, e)
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        await wrote(e, 9)
        await e.pause("hold")
        before = [(list(live.tokens), list(live.logprobs)) for live in e.scheduler.running]
        if cache == "dropped":
            await e.sleep(("kv_cache",))
            assert e.pages.free_count == e.pages.count and e.pages.keys.pool_bytes == 0
        trainer.train()
        assert await sync(trainer, e) == 1
        if cache == "dropped":
            assert (await e.status()).state == "asleep" and (await e.status()).parked == 3
            await e.wake(("kv_cache",))
        assert (await e.status()).state == "held" and not any(t.done() for t in tasks)
        await e.resume()
        done = await asyncio.gather(*tasks)
        idle(e)
        return before, done

    before, done = asyncio.run(main())
    for request, (tokens, logprobs), c in zip(requests, before, done):
        n = len(tokens) - len(request.tokens)
        assert 9 <= n < 30 and c.tokens[:n] == tokens[len(request.tokens) :] and c.logprobs[:n] == logprobs
        assert c.versions == [0] * n + [1] * (30 - n)
        whole, start = request.tokens + c.tokens, len(request.tokens) - 1
        first = plain_logprobs(old, whole)[start:]
        later = (
            replayed(old, model, whole, len(tokens) - 1)[start:]
            if cache == "kept"
            else plain_logprobs(model, whole)[start:]
        )
        assert c.logprobs[:n] == pytest.approx(first[:n], abs=1e-5)
        assert c.logprobs[n:] == pytest.approx(later[n:], abs=2e-5)
        assert max(abs(a - b) for a, b in zip(later[n:], first[n:])) > 0.01  # the weights did change something


def test_hold_without_an_update_changes_nothing():
    model, requests = tiny(), [ask(prompt(i, 20), key=i, n=25) for i in range(4)]
    free = asyncio.run(all_of(engine(model), requests))

    async def main():
        e = engine(model)
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        for n in (1, 5, 12):
            await wrote(e, n)
            await e.pause("hold")
            before = [list(live.tokens) for live in e.scheduler.running]
            for _ in range(20):
                await asyncio.sleep(0)
            assert before == [live.tokens for live in e.scheduler.running]
            await e.resume()
        done = await asyncio.gather(*tasks)
        idle(e)
        return done

    for a, b in zip(asyncio.run(main()), free):
        assert (a.tokens, a.logprobs, set(a.versions)) == (b.tokens, b.logprobs, {0})


def test_a_request_that_arrives_while_held_waits():
    async def main():
        e = engine(tiny())
        await e.pause("hold")
        task = asyncio.create_task(e.generate(ask(prompt(1, 10))))
        await asyncio.sleep(0.02)
        assert not task.done() and (await e.status()).parked == 1
        await e.resume()
        assert len((await task).tokens) == 16

    asyncio.run(main())


def test_a_request_that_arrives_during_an_update_waits_for_its_commit():
    """Also on an engine that nobody paused, and also when somebody resumes it too early."""
    model = tiny()
    trainer = Publisher(twin(model))

    async def main():
        e = engine(model)
        trainer.train()
        manifest, route = await trainer.publish(Route("tensor"))
        await e.receive(Begin(manifest))
        task = asyncio.create_task(e.generate(ask(prompt(1, 10))))
        await e.resume()
        for _ in range(9):
            await asyncio.sleep(0)
        await e.receive(route)
        assert not task.done() and not e.scheduler.running
        with pytest.raises(EngineError, match="weights are arriving"):
            await e.score(ask([1, 2, 3]))
        await e.receive(Commit(1, manifest.root))
        assert (await task).versions == [1] * 16

    asyncio.run(main())


def test_sleep_and_update_of_an_engine_that_runs_are_errors():
    model = tiny()

    async def main():
        e = engine(model)
        task = asyncio.create_task(e.generate(ask(prompt(1, 10), n=40)))
        await wrote(e, 2)
        with pytest.raises(EngineError, match=r"pause the engine first"):
            await e.sleep(("kv_cache",))
        with pytest.raises(SyncError, match="pause the engine first"):
            await e.receive(Begin(names.build_manifest(model.model, 1)))
        done = await task
        assert len(done.tokens) == 40 and (await e.status()).state == "serving"
        await e.sleep(("kv_cache",))  # idle: no pause needed
        assert (await e.status()).state == "asleep"

    asyncio.run(main())


def test_an_engine_that_sleeps_serves_when_every_tag_is_back():
    async def main():
        e = engine(tiny())
        await e.sleep(("kv_cache", "weights"))
        await e.sleep(())
        task = asyncio.create_task(e.generate(ask(prompt(1, 10))))
        await e.wake(("weights",))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await e.status()).state == "asleep" and not task.done()
        await e.wake(("kv_cache",))
        assert len((await task).tokens) == 16 and (await e.status()).state == "serving"

    asyncio.run(main())


def test_abort_returns_what_is_written():
    model, requests = tiny(), [ask(prompt(i, 20), key=i, n=40) for i in range(4)]
    free = asyncio.run(all_of(engine(model), requests))

    async def main():
        e = engine(model, max_running=3)
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        await wrote(e, 7)
        await e.pause("abort")
        done = await asyncio.gather(*tasks)
        idle(e)
        assert (await e.status()).state == "held"
        return done

    done = asyncio.run(main())
    for a, b in zip(done[:3], free):
        n = len(a.tokens)
        assert a.finish_reason == "abort" and 7 <= n < 40
        assert (a.tokens, a.versions) == (b.tokens[:n], [0] * n) and a.logprobs == pytest.approx(
            b.logprobs[:n], abs=1e-5
        )
    assert done[3].finish_reason == "abort" and done[3].tokens == []


@pytest.mark.parametrize("pages", [4096, 75])
def test_drain_ends_the_begun_and_keeps_the_others(pages):
    """With 75 pages some of the begun ones are retracted meanwhile; they still end under the
    weights that began them.
    """
    model, requests = tiny(), [ask(prompt(i, 10 + i), key=i, n=30) for i in range(6)]

    async def main():
        e = engine(model, max_running=3, kv_pages=pages)
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        await wrote(e, 4)
        await e.pause("drain")
        assert [t.done() for t in tasks] == [True] * 3 + [False] * 3 and e.scheduler.running == []
        assert len(e.scheduler.waiting) == 3 and (e.scheduler.retracted > 0) == (pages == 75)
        late = asyncio.create_task(e.generate(requests[0]))
        e.version = 1
        await e.resume()
        done = await asyncio.gather(*tasks, late)
        idle(e)
        return done

    done = asyncio.run(main())
    assert [set(c.versions) for c in done] == [{0}] * 3 + [{1}] * 4 and all(len(c.tokens) == 30 for c in done)


def test_a_lease_that_ends_resumes_and_warns():
    said = []
    stop = subscribe(lambda event: said.append(event) if isinstance(event, Warned) else None)

    async def main():
        e = engine(tiny())
        task = asyncio.create_task(e.generate(ask(prompt(1, 10), n=40)))
        await wrote(e, 2)
        await e.pause("hold", lease=0.05)
        await e.pause("hold", lease=0.15)  # the second replaces the first
        await asyncio.sleep(0.1)
        assert (await e.status()).state == "held" and not said
        assert len((await asyncio.wait_for(task, 5)).tokens) == 40
        assert (await e.status()).state == "serving" and len(said) == 1
        await e.pause("hold", lease=0.05)
        await e.resume()
        await e.pause("hold")
        await asyncio.sleep(0.1)
        assert (await e.status()).state == "held" and len(said) == 1, "the lease of an ended pause ended another one"

    try:
        asyncio.run(main())
    finally:
        stop()
    assert "nobody resumed it; it is serving again at version 0" in said[0].message


def test_a_lease_that_ends_during_an_update_serves_only_after_its_commit():
    model = tiny()
    trainer = Publisher(twin(model))

    async def main():
        e = engine(model)
        trainer.train()
        manifest, route = await trainer.publish(Route("tensor"))
        task = asyncio.create_task(e.generate(ask(prompt(1, 10), n=20)))
        await wrote(e, 2)
        await e.pause("hold", lease=0.02)
        await e.receive(Begin(manifest))
        await asyncio.sleep(0.06)
        assert (await e.status()).state == "held" and not task.done()
        await e.receive(route)
        await e.receive(Commit(1, manifest.root))
        c = await asyncio.wait_for(task, 5)
        assert len(c.tokens) == 20 and c.versions[-1] == 1 and sorted(c.versions) == c.versions

    asyncio.run(main())


def test_an_unknown_way_to_pause():
    with pytest.raises(UserError, match="hold, drain, abort"):
        asyncio.run(engine(tiny()).pause("freeze"))


# -- callers that go away --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 3, 8])
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


def test_a_deadline_says_who_waits_for_whom():
    async def main():
        e = engine(tiny())
        request = ask(prompt(1, 10))
        request.deadline = 0.05
        await e.pause("hold")
        with pytest.raises(
            StalledError, match=r"waits for the engine since 0.05 s; it had written 0 tokens, engine held"
        ):
            await e.generate(request)
        await e.resume()
        idle(e)
        assert len((await e.generate(ask(prompt(1, 10)))).tokens) == 16

    asyncio.run(main())


# -- a step that breaks ----------------------------------------------------------------------------


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
        assert e.scheduler.tree.cached == 0, "pages that no step computed are in the cache"
        fails = False
        with pytest.raises(EngineError, match="its step broke: RuntimeError: out of memory"):
            await e.generate(ask(prompt(1, 20)))
        await updater()(trainer, e)
        return await e.generate(ask(prompt(1, 20), key=1))

    assert asyncio.run(main()).tokens == asyncio.run(engine(model).generate(ask(prompt(1, 20), key=1))).tokens


def test_samples_parked_when_an_update_fails_go_on_after_a_good_one():
    model = tiny()
    trainer = Publisher(twin(model))

    async def main():
        e = engine(model)
        task = asyncio.create_task(e.generate(ask(prompt(1, 10), n=30)))
        await wrote(e, 5)
        await e.pause("hold")
        await e.receive(Abort("the trainer died"))
        await e.resume()
        await asyncio.sleep(0.01)
        assert not task.done() and (await e.status()).state == "refusing"
        trainer.train()
        await updater()(trainer, e)
        c = await asyncio.wait_for(task, 5)
        assert len(c.tokens) == 30 and set(c.versions) == {0, 1}

    asyncio.run(main())
