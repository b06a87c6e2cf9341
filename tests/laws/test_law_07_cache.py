"""Law 7, cache: the root of the prefix tree is (version, adapter, namespace), so a stale prefix cannot match. Keys and
values written by an older version never enter the new root. Free + cached + private pages = all pages.

The tree alone is in tests/units/test_radix.py, the scheduler without arithmetic in test_scheduler.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kits.engine import all_of, ask, engine, idle, prompt, publish_in_place, tiny, watched
from kits.sweeps import covering
from rondel.core.errors import LawError, UserError

MODEL = tiny()


def tokens_of(completions):
    return [c.tokens for c in completions]


@pytest.mark.parametrize("together", [True, False])
def test_siblings_prefill_their_prompt_once(together):
    e, p, g = watched(engine(MODEL)), prompt(1, 40), 8
    requests = [ask(p, key=k, n=6) for k in range(g)]

    async def main():
        if together:
            return await all_of(e, requests)
        return [await e.generate(r) for r in requests]

    done = asyncio.run(main())
    assert e.scheduler.prefilled == len(p) + (g - 1)
    assert [c.cached_tokens for c in done] == [0] + [len(p) - 1] * (g - 1)
    idle(e)
    assert tokens_of(done) == [asyncio.run(engine(MODEL).generate(r)).tokens for r in requests]


@pytest.mark.parametrize("length", [1, 2, 7])
def test_short_prompts_are_cached_too(length):
    """Too short to be worth waiting for a sibling, but nothing is lost or double: the duplicates are given back."""
    e, p = watched(engine(MODEL)), prompt(2, length)
    first = asyncio.run(all_of(e, [ask(p, key=k) for k in range(6)]))
    assert tokens_of(asyncio.run(all_of(e, [ask(p, key=k) for k in range(6)]))) == tokens_of(first)
    idle(e)


def test_a_prompt_that_is_cached_whole_feeds_its_last_token():
    e, p = watched(engine(MODEL)), prompt(3, 30)
    first = asyncio.run(e.generate(ask(p, key=1)))
    again = asyncio.run(e.generate(ask(p, key=1)))
    assert (again.tokens, again.cached_tokens) == (first.tokens, len(p) - 1)
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    # the next turn: the answer is cached but for its last token
    longer = asyncio.run(e.generate(ask(p + first.tokens, key=2)))
    assert longer.cached_tokens == len(p) + len(first.tokens) - 1
    idle(e)


@pytest.mark.slow
def test_a_turn_prefills_what_came_since_the_last_one():
    """The last token of an answer was drawn and never fed, so a turn costs the world's words and one."""
    model, answer, words = tiny(), 9, [30, 7, 1, 12, 5]

    async def conversation(e, seed):
        history, cost, said = [], [], []
        for turn, n in enumerate(words):
            history += prompt(100 * seed + turn, n)
            before = e.scheduler.prefilled
            done = await e.generate(ask(history, key=turn, n=answer))
            cost.append(e.scheduler.prefilled - before)
            history += done.tokens
            said.append(done.tokens)
        return cost, said

    async def main():
        e = watched(engine(model))
        first = await conversation(e, 1)
        again = await conversation(e, 1)
        other = await conversation(e, 2)
        await new_weights(e, model, 1, change=0.1)
        fresh = await conversation(e, 1)
        idle(e)
        return first, again, other, fresh

    first, again, other, fresh = asyncio.run(main())
    deltas = [words[0], *(n + 1 for n in words[1:])]
    assert first[0] == other[0] == fresh[0] == deltas
    assert again == ([1] * len(words), first[1])
    assert fresh[1] == asyncio.run(conversation(engine(model), 1))[1] != first[1]


def test_new_weights_between_two_turns_cost_the_whole_history():
    model = tiny()

    async def main():
        e = watched(engine(model))
        first = await e.generate(ask(prompt(1, 30), n=9))
        history = prompt(1, 30) + first.tokens + prompt(2, 6)
        await new_weights(e, model, 1, change=0.1)
        before = e.scheduler.prefilled
        second = await e.generate(ask(history, n=9))
        idle(e)
        return e.scheduler.prefilled - before, len(history), second.cached_tokens

    cost, length, cached = asyncio.run(main())
    assert (cost, cached) == (length, 0)


def test_siblings_of_a_second_turn_prefill_their_own_deltas():
    """G conversations over one prompt: the prompt once, then to each its answer's last
    token and what the world said to it.
    """
    e, p, g = watched(engine(MODEL)), prompt(1, 40), 4

    async def main():
        firsts = await all_of(e, [ask(p, key=k, n=8) for k in range(g)])
        before = e.scheduler.prefilled
        await all_of(e, [ask(p + c.tokens + prompt(50 + k, 5 + k), key=10 + k, n=8) for k, c in enumerate(firsts)])
        return before, e.scheduler.prefilled - before

    assert asyncio.run(main()) == (len(p) + g - 1, sum(1 + 5 + k for k in range(g)))
    idle(e)


@pytest.mark.slow
@pytest.mark.parametrize("max_running", covering([8, 32], [32]))  # more of them are retracted
def test_oversubscribed_pages_change_no_token(max_running):
    """Ten times more wanted than there is: requests are retracted and finish as if alone."""
    requests = [ask(prompt(10 + i, 10 + i % 7), key=i, n=24, temperature=i % 2) for i in range(30)]
    free = asyncio.run(all_of(engine(MODEL), requests))
    tight = watched(engine(MODEL, kv_pages=100, max_running=max_running))
    assert sum(len(r.tokens) + 24 for r in requests) >= 10 * tight.pages.count
    done = asyncio.run(asyncio.wait_for(all_of(tight, requests), 60))
    assert tight.scheduler.retracted > 0 and tokens_of(done) == tokens_of(free)
    for a, b in zip(done, free):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    idle(tight)


@pytest.mark.slow
def test_groups_under_pressure():
    requests = [ask(prompt(g, 30), key=100 * g + i, n=20) for g in range(5) for i in range(4)]
    free = asyncio.run(all_of(engine(MODEL), requests))
    tight = watched(engine(MODEL, kv_pages=90, prefill_tokens=16))
    assert tokens_of(asyncio.run(all_of(tight, requests))) == tokens_of(free)
    idle(tight)


def test_one_request_may_fill_the_whole_cache():
    e = watched(engine(MODEL, kv_pages=50, prefill_tokens=8))
    done = asyncio.run(all_of(e, [ask(prompt(i, 30), key=i, n=20) for i in range(3)]))
    assert [len(c.tokens) for c in done] == [20] * 3
    idle(e)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, together, pages",
    [(320, 8, 300), pytest.param(1_500, 48, 1600, marks=pytest.mark.sweep)],  # more of the same
)
def test_many_requests_leak_no_page(count, together, pages):
    """All are there at once. At its first token every eleventh asks for its end, and the
    caller of every thirteenth goes away.
    """
    e = engine(MODEL, kv_pages=pages, max_running=together)
    requests = [replace(ask(prompt(i % 40, 3 + i % 23), key=i, n=2 + i % 9), id=str(i)) for i in range(count)]
    tasks, aborts = [], []

    def heard(i):
        if i % 11 == 0:
            aborts.append(asyncio.ensure_future(e.abort(lambda request: request.id == str(i))))
        elif i % 13 == 0:
            tasks[i].cancel()

    async def main():
        tasks.extend(
            asyncio.create_task(e.generate(r, on_token=lambda *_, i=i: heard(i))) for i, r in enumerate(requests)
        )
        return await asyncio.gather(*tasks, return_exceptions=True)

    for i, c in enumerate(asyncio.run(main())):
        if i % 13 == 0 and i % 11:
            assert isinstance(c, asyncio.CancelledError)
        elif i % 11 == 0:
            assert c.finish_reason == "abort" or len(c.tokens) <= 2
        else:
            assert c.finish_reason == "length" and len(c.tokens) == requests[i].sampling.max_tokens
    assert len(aborts) > count / 12
    idle(e)
    e.pages.free_pages(e.scheduler.caches[0].tree.evict(e.pages.count))
    assert e.pages.free_count == e.pages.count and len(e.scheduler._rows) == together


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked_prefill_equals_unchunked(chunk):
    requests = [ask(prompt(i, 33 + i), key=i) for i in range(4)]
    whole = asyncio.run(all_of(engine(MODEL), requests))
    e = watched(engine(MODEL, prefill_tokens=chunk))
    cut = asyncio.run(all_of(e, requests))
    assert tokens_of(cut) == tokens_of(whole)
    for a, b in zip(cut, whole):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    idle(e)


@pytest.mark.slow
def test_max_running_smaller_than_the_requests():
    requests = [ask(prompt(i, 12), key=i) for i in range(11)]
    e, most = watched(engine(MODEL, max_running=2)), []
    computed = e.scheduler.mark_computed
    e.scheduler.mark_computed = lambda plan: (most.append(len(e.scheduler.running)), computed(plan))
    assert tokens_of(asyncio.run(all_of(e, requests))) == tokens_of(asyncio.run(all_of(engine(MODEL), requests)))
    assert max(most) == 2
    idle(e)


async def new_weights(e, model, version, change=0.0):
    """A hand-over in place, as the trainer of the same process does it."""
    for p in model.model.parameters():
        p.data.mul_(1 + change)
    await publish_in_place(e, version)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 0])
def test_keys_and_values_of_old_weights_never_enter_the_new_root(version):
    """Also when the same number comes with other weights, as after a failed update that is sent again."""
    model = tiny()
    p = prompt(5, 40)

    async def main():
        e = watched(engine(model))
        await e.generate(ask(p, key=1))  # finished before: its prompt is cached
        tasks = [asyncio.create_task(e.generate(ask(p, key=2 + i, n=30))) for i in range(3)]
        while not any(live.written > 4 for live in e.scheduler.running):
            await asyncio.sleep(0)
        await e.pause("hold")
        await new_weights(e, model, version, change=0.1)
        await e.resume()
        fresh = await e.generate(ask(p, key=9))  # while the old ones still run
        mixed = await asyncio.gather(*tasks)
        again = await e.generate(ask(p, key=9))
        idle(e)
        assert {root[0] for root in e.scheduler.caches[0].tree.roots} == {version}
        return fresh, mixed, again

    fresh, mixed, again = asyncio.run(main())
    truth = asyncio.run(engine(model).generate(ask(p, key=9)))
    assert fresh.cached_tokens in ((0,) if version else (0, len(p) - 1)) and again.cached_tokens == len(p) - 1
    for c in (fresh, again):
        assert c.tokens == truth.tokens and c.logprobs == pytest.approx(truth.logprobs, abs=1e-5)
    if version:
        assert all(set(c.versions) == {0, 1} for c in mixed)


def test_namespaces_do_not_share():
    e, p = engine(MODEL), prompt(6, 30)
    asyncio.run(e.generate(ask(p, key=1)))
    other = asyncio.run(e.generate(replace(ask(p, key=1), namespace="held-out")))
    assert other.cached_tokens == 0
    idle(e)


@pytest.mark.parametrize(
    "request_, says",
    [
        (ask([], n=4), "empty prompt"),
        (ask(prompt(1, 500), n=40), "context of 512"),
        (ask(prompt(1, 90), n=40), "engine.kv_pages"),
        (ask([5, 10**6]), "token 1000000 does not exist"),
        (ask([5, -1]), "token -1 does not exist"),
        (replace(ask([5, 6]), adapter="lora"), "no adapter 'lora'"),
        (replace(ask([5, 6]), wants=frozenset({"experts"})), "no routed experts"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(request_, says):
    async def main():
        e = engine(MODEL, kv_pages=100)
        good = asyncio.create_task(e.generate(ask(prompt(1, 20), n=20)))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match=says):
            await e.generate(request_)
        assert len((await good).tokens) == 20
        idle(e)

    asyncio.run(main())


def test_a_lost_page_is_an_error_not_a_slow_leak():
    async def main():
        e = engine(MODEL)
        e.pages.allocate_pages(1)
        with pytest.raises(Exception, match=r"pages do not add up"):
            await e.generate(ask(prompt(1, 9)))

    asyncio.run(main())
    with pytest.raises(LawError, match=r"pages do not add up|cached pages are locked"):
        e = engine(MODEL)
        e.pages.allocate_pages(1)
        e.scheduler.check_invariants()


def test_nothing_is_evicted_in_vain():
    """A request for which there is no room even without the cache leaves the cache alone."""
    e = engine(MODEL, kv_pages=100)
    asyncio.run(e.generate(ask(prompt(1, 40), n=1)))
    holder = e.scheduler.caches[0]
    node, _ = holder.tree.match_prefix((0, "", ""), prompt(1, 40)[:20])
    holder.tree.lock(node)
    assert not holder.make_room(81) and holder.tree.cached == 40
    assert holder.make_room(80) and holder.tree.cached == 20


def test_siblings_wait_for_their_prompt_and_not_for_each_other():
    """G siblings take as many steps as one of them and the step that computes their prompt, not G more."""
    e, steps = engine(tiny()), []
    run = e.serving.run

    async def counted(function, *args):
        steps.append(function)
        return await run(function, *args)

    e.serving.run = counted

    async def main():
        await asyncio.gather(*(e.generate(ask(prompt(1, 12), n=5, key=k)) for k in range(8)))

    asyncio.run(main())
    assert len(steps) == 5 + 1
