"""A decode step that begins before the one in front of it is read: the tokens and log-probabilities of the plain order,
bit for bit with aligned numerics; the host reads a step only after the next one was begun; at most one row a request is
computed for nobody.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kits.aligned import model as aligned
from kits.engine import all_of, ask, engine, idle, prompt, publish_in_place, tiny, twin, watched
from kits.host_waits import BlockingUploads, DeviceTensors
from kits.sweeps import covering
from kits.token_log import asked, dies, serving
from rondel.generate.engine.builtin import runner
from rondel.models.cache_pools import HostCopy

WISHES = [
    {},
    {"ignore_eos": False, "temperature": 1.3, "stop": tuple(range(0, 100, 8))},
    {"temperature": 0.0, "ignore_eos": False},
    {"stop": ("e", "7", *range(1, 100, 9)), "ignore_eos": False},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 0.8},
    {"top_p": 0.7},
    {"min_tokens": 6, "ignore_eos": False, "stop": (9, 10, 11, 12)},
    {"repetition_penalty": 1.3},
    {"logit_bias": {9: 2.0}},
]


def mixture(seed: int, n: int = 11):
    """Requests of all wishes, siblings among them, some that want to know more."""
    chance = random.Random(seed)
    lengths = [chance.randrange(6 if i % 10 == 7 else 1, 16) for i in range(n)]
    plain = [ask(prompt(i % 5, 4 + 6 * (i % 5)), key=i, n=lengths[i], **WISHES[i % 10]) for i in range(n)]
    return [replace(r, wants=frozenset({"top_logprobs:2"})) if i == 10 else r for i, r in enumerate(plain)]


def told(done):
    return [(c.tokens, c.logprobs, c.versions, c.finish_reason, c.text) for c in done]


async def arriving(e, requests, seed):
    """They come one after the other, while others decode."""
    chance = random.Random(seed)

    async def one(request, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        return await e.generate(request)

    return await asyncio.gather(*(one(r, 12 * chance.randrange(6)) for r in requests))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, pages, running", covering([(0, 4096, 16), (1, 4096, 3), (2, 110, 6)], [(1, 4096, 3), (2, 110, 6)])
)
def test_any_mixture_is_answered_as_in_the_plain_order(seed, pages, running):
    """Ends by length, token and string, requests that must be planned in the plain order, others that wait, prompts in
    chunks, too few pages."""
    loaded, how = aligned("llama", "float32"), {"kv_pages": pages, "max_running": running, "prefill_tokens": 16}
    ahead, plain = watched(engine(loaded, decode_ahead=True, **how)), engine(loaded, **how)
    stopped = 0
    for wishes in (mixture(seed), [ask(prompt(i, 5), key=i, n=14, **WISHES[i % 4]) for i in range(6)]):
        ours, theirs = (asyncio.run(arriving(e, wishes, seed)) for e in (ahead, plain))
        assert told(ours) == told(theirs)
        idle(ahead)
        stopped += sum(c.finish_reason == "stop" for c in ours)
    assert ahead.serving.ahead.steps > 8 and plain.serving.ahead is None
    assert 0 < ahead.serving.ahead.wasted <= stopped


@pytest.mark.slow
def test_batches_are_those_of_the_plain_order_where_all_end_by_length():
    """So that even numerics which depend on the batch give the same bits, routes of experts included."""
    loaded = tiny("mixtral")
    wishes = [replace(ask(prompt(i % 2, 7), key=i, n=5 + 3 * i), wants=frozenset({"experts"})) for i in range(6)]
    engines = [engine(loaded, routes=True, max_running=4, decode_ahead=ahead) for ahead in (True, False)]
    ours, theirs = (asyncio.run(all_of(e, wishes)) for e in engines)
    assert told(ours) == told(theirs)
    assert all((a.experts == b.experts).all() for a, b in zip(ours, theirs, strict=True))
    assert engines[0].serving.ahead.steps > 10 and not engines[0].serving.ahead.wasted


def test_a_row_for_nobody_is_computed_once_for_each_that_ends_by_its_token():
    loaded = tiny("llama")
    found = asyncio.run(engine(loaded).generate(ask(prompt(0, 5), key=1, n=12)))
    last = next(t for t in found.tokens[4:] if t not in found.tokens[:4])
    e = engine(loaded, decode_ahead=True)
    done = asyncio.run(e.generate(ask(prompt(0, 5), key=1, n=12, stop=(last,))))
    assert done.tokens == found.tokens[: found.tokens.index(last) + 1] and done.finish_reason == "stop"
    assert e.serving.ahead.wasted == 1 and e.serving.ahead.plan is None and e.serving.has_stopped
    idle(e)


@pytest.mark.slow
def test_new_weights_drain_the_step_under_way_and_a_replay_in_the_plain_order_gives_the_same_bits():
    """Weights that change in the middle of answers: every token was drawn under the version that it names."""
    wishes = [ask(prompt(i, 6 + i), key=i, n=20 + i) for i in range(6)]

    async def update(e, version):
        await e.pause("hold")
        assert e.serving.ahead is None or e.serving.ahead.plan is None
        assert not any(live.ahead for live in e.scheduler.running)
        with torch.no_grad():
            e.loaded.model.get_input_embeddings().weight.mul_(1.1)
        await publish_in_place(e, version)
        await e.resume()

    async def life(e, wishes, moment):
        calls = [asyncio.create_task(e.generate(r)) for r in wishes]
        await asyncio.sleep(0)
        for version in (1, 2):
            while min((live.written for live in e.scheduler.running), default=0) < moment * version:
                await asyncio.sleep(0)
            assert not moment or e.serving.ahead.plan is not None
            await update(e, version)
        return await asyncio.gather(*calls)

    first = engine(aligned("llama", "float32"), decode_ahead=True, max_running=6, prefill_tokens=16)
    done = asyncio.run(life(first, wishes, 6))
    idle(first)
    assert all(set(c.versions) == {0, 1, 2} for c in done)
    lines = [replace(r, lines=tuple(c.stints)) for r, c in zip(wishes, done, strict=True)]
    second = engine(aligned("llama", "float32"), max_running=9)
    assert told(asyncio.run(life(second, lines, 0))) == told(done)


@pytest.mark.slow
def test_an_abort_of_all_returns_what_is_read():
    loaded = aligned("llama", "float32")
    wishes = [ask(prompt(i, 6), key=i, n=30) for i in range(4)]
    expected = asyncio.run(arriving(engine(loaded), wishes, 0))
    e = engine(loaded, decode_ahead=True)

    async def life():
        calls = [asyncio.create_task(e.generate(r)) for r in wishes]
        while min((live.written for live in e.scheduler.running), default=0) < 5:
            await asyncio.sleep(0)
        await e.pause("abort")
        return await asyncio.gather(*calls)

    for ours, theirs in zip(asyncio.run(life()), expected, strict=True):
        n = len(ours.tokens)
        assert ours.finish_reason == "abort" and 5 <= n < 9
        assert (ours.tokens, ours.logprobs) == (theirs.tokens[:n], theirs.logprobs[:n])
    idle(e)


@pytest.mark.slow
def test_whoever_leaves_while_a_step_is_under_way_takes_nothing_along():
    """One is aborted, one goes away; the others' tokens, the pages and the log know nothing of their last rows."""
    loaded = aligned("llama", "float32")
    wishes = [ask(prompt(i, 6), key=i, n=30) for i in range(4)]
    expected = asyncio.run(engine(loaded).generate(wishes[0])).tokens
    e = watched(engine(loaded, decode_ahead=True))

    async def life():
        calls = [asyncio.create_task(e.generate(r)) for r in wishes]
        while min((live.written for live in e.scheduler.running), default=0) < 5:
            await asyncio.sleep(0)
        assert e.serving.ahead.plan is not None and await e.abort(lambda r: r.key == 1) == 1
        calls[2].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    done = asyncio.run(life())
    idle(e)
    assert done[0].tokens == expected and done[1].finish_reason == "abort" and 5 <= len(done[1].tokens) < 9
    assert e.serving.ahead.wasted == 2


@pytest.mark.slow
def test_a_life_that_ends_is_continued_from_its_log(tmp_path):
    expected = told(asyncio.run(arriving(serving(tmp_path / "plain"), asked(), 0)))
    first = serving(tmp_path / "log", decode_ahead=True)
    asyncio.run(dies(first, asked(), 7))
    assert first.serving.ahead.steps
    first.log.close()
    second = serving(tmp_path / "log", decode_ahead=True)
    found = told(asyncio.run(arriving(second, asked(), 0)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-5) and ours[2:] == theirs[2:]


def test_a_step_that_breaks_leaves_nothing_begun():
    e = engine(tiny("llama"), decode_ahead=True)
    launch, count = e.runner._launch, []

    def breaks(*given, **named):
        count.append(1)
        if len(count) == 5:
            raise RuntimeError("the device fell off the bus")
        return launch(*given, **named)

    e.runner._launch = breaks
    with pytest.raises(Exception, match="fell off the bus"):
        asyncio.run(e.generate(ask(prompt(0, 5), n=20)))
    assert e.serving.ahead.plan is None and e.runner._ahead is None
    idle(e)


# -- what the host waits for --------------------------------------------------------------------------


class Watched:
    """Launches and reads of an engine in order, each with its step, and whatever made the host wait within a launch."""

    def __init__(self, e, monkeypatch):
        self.events, self.waits, self.e = [], [], e
        launch, watched = e.runner._launch, self

        def launched(*given, **named):
            device = DeviceTensors(e.loaded.model.parameters())
            uploads = BlockingUploads()
            with device, uploads:
                out = launch(*given, **named)
            if "after" in named:
                watched.waits += device.waits + uploads.found
            watched.events.append(("launch", out, "after" in named))
            return out

        class Delayed(HostCopy):
            """Nobody sees the numbers before they are waited for."""

            def wait(self):
                watched.events.append(("read", self, None))
                return super().wait()

        e.runner._launch = launched
        monkeypatch.setattr(runner, "HostCopy", Delayed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["llama", "mixtral"], ["mixtral"]))
def test_the_next_step_is_begun_before_the_host_reads_one(monkeypatch, kind):
    loaded = tiny(kind)
    e = engine(twin(loaded), decode_ahead=True)
    watch = Watched(e, monkeypatch)
    wishes = [ask(prompt(i, 6), key=i, n=12, **WISHES[(0, 2, 4, 5)[i]]) for i in range(4)]
    asyncio.run(arriving(e, wishes, 3))
    assert not watch.waits, set(watch.waits)
    steps = [out for kind_, out, _ in watch.events if kind_ == "launch"]
    reads: dict[int, list[int]] = {}
    for i, (kind_, out, _) in enumerate(watch.events):
        reads.setdefault(id(out), []).extend([i] if kind_ == "read" else [])
    launched = {id(out): i for i, (kind_, out, _) in enumerate(watch.events) if kind_ == "launch"}
    ahead = 0
    for before, out in pairwise(steps):
        is_ahead = watch.events[launched[id(out)]][2]
        ahead += is_ahead
        (read,) = reads[id(before.drawn)]
        assert (launched[id(out)] < read) == is_ahead
    assert ahead == e.serving.ahead.steps > 8


def test_uploads_that_the_host_waits_for_are_found():
    with BlockingUploads() as uploads:
        torch.tensor([1], device="cpu")
        torch.ones(2).to(torch.device("cpu"))
        torch.ones(3)[[0, 2]]
        torch.ones(2).to(torch.device("cpu"), non_blocking=True)
    assert [where.split()[0] for where in uploads.found] == ["tensor", "to", "__getitem__"]
