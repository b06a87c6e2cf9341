"""Law 15, interruption: an interrupted sample continues from its tokens and never starts again, because restarting
favours short answers. It continues in memory from the parked request, and after a crash from the token log.

Every token says which weights drew it. The log itself is in tests/units/test_wal.py.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from kits.engine import all_of, ask, engine, idle, plain_logprobs, prompt, tiny, twin
from kits.sync import Publisher, updater, wrote
from kits.token_log import asked, counted, dies, said, serving, two_versions
from rondel.core.errors import EngineError, UserError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Abort, Begin, Commit, Route
from rondel.runtime.journal.wal import TokenLog


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


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- after a crash, from the token log -------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return two_versions(tmp_path)


def test_a_sample_goes_on_from_its_tokens(folder):
    log = TokenLog(folder)
    log.record_version(4, "root-4")
    got = list(log.recall_tokens(1, 7))
    assert got == [(100 + i, -0.1 * (i + 1), 3 if i < 5 else 4, None) for i in range(7)]
    assert list(log.recall_tokens(1, 7)) == []  # it is this life's now
    assert said(log, 3, first=1) == [101]
    assert said(log, 99) == []


@pytest.mark.slow
def test_interrupted_lengths_are_those_of_uninterrupted_samples(tmp_path):
    """h = 0.02, q = 0.01: restarting gives a mean of 33.6 tokens, the log 50;
    Kolmogorov-Smirnov tells them apart.
    """
    rng, h, q, n = np.random.default_rng(0), 0.02, 0.01, 300
    log = TokenLog(tmp_path / "wal")
    log.record_version(0, "root")

    def life(key: int | None, noise: np.random.Generator, done: int) -> tuple[int, bool]:
        """Draw until the end or an interruption. -> (tokens, finished)."""
        while True:
            if rng.random() < q:
                return done, False
            if key is not None:
                log.write([(key, done, 0, 0.0, 1, 0)])
            done += 1
            if noise.random() < h:
                return done, True

    kept, restarted = [], []
    for key in range(n):
        noise, done, finished = np.random.default_rng((1, key)), 0, False
        while not finished:
            done, finished = life(key, noise, done)
        kept.append(done)
        finished = False
        while not finished:  # another chance each time
            done, finished = life(None, rng, 0)
        restarted.append(done)
    log.close()
    again = TokenLog(tmp_path / "wal")
    again.record_version(0, "root")
    assert all(len(said(again, key, 0)) == length for key, length in enumerate(kept))
    assert np.mean(kept) == pytest.approx(1 / h, rel=0.1)
    assert np.mean(restarted) == pytest.approx(1 / (1 - (1 - h) * (1 - q)), rel=0.1)
    limit = 1.63 / math.sqrt(n)  # 1 %
    assert ks(kept, h) < limit < ks(restarted, h)


def ks(lengths: list[int], h: float) -> float:
    """Largest distance to the geometric distribution."""
    at = np.arange(1, max(lengths) + 1)
    ours = np.searchsorted(np.sort(lengths), at, side="right") / len(lengths)
    return float(np.abs(ours - (1 - (1 - h) ** at)).max())


@pytest.mark.slow
def test_an_engine_that_died_goes_on_from_its_tokens(tmp_path):
    """Tokens and logprobs as if nothing had happened, and none is drawn a second time."""
    whole = asyncio.run(all_of(serving(tmp_path / "other"), asked()))

    asyncio.run(dies(serving(tmp_path / "wal"), asked(), 9))
    e = serving(tmp_path / "wal")
    drawn = counted(e)
    again = asyncio.run(all_of(e, asked()))
    assert [c.tokens for c in again] == [c.tokens for c in whole]
    assert [c.finish_reason for c in again] == [c.finish_reason for c in whole]
    for a, b in zip(again, whole):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.versions == [1] * len(a.tokens)
    total = sum(len(c.tokens) for c in whole)
    assert sum(drawn) <= total - 6 * 9


def test_a_sample_that_had_ended_is_not_asked_again(tmp_path):
    first = asyncio.run(all_of(serving(tmp_path), asked()))
    e = serving(tmp_path)
    e.runner.step = None  # it would break
    again = asyncio.run(all_of(e, asked()))
    assert [(c.tokens, c.logprobs, c.text, c.finish_reason) for c in again] == [
        (c.tokens, c.logprobs, c.text, c.finish_reason) for c in first
    ]
