"""Speculative decoding changes how fast tokens come and nothing else: the same tokens with
look-ups, the same distribution with a draft.
"""

from __future__ import annotations

import asyncio
import copy
import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from kits.drafts import LITTLE, MODEL, drafted
from kits.engine import (
    SIZE,
    all_of,
    ask,
    engine,
    idle,
    plain_logits,
    plain_logprobs,
    prompt,
    publish_in_place,
    tiny,
    twin,
    watched,
)
from kits.routing import MOES, own_routes
from kits.sampling import chi_square
from kits.sampling import reference as truncated
from kits.sweeps import covering
from rondel.core.errors import ConfigError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Sampling, sample_key
from rondel.generate.engine.builtin.ngrams import NgramIndex
from rondel.generate.engine.builtin.rejection import accept_draft_tokens, matching_prefix_length, residual_weights
from rondel.generate.engine.builtin.sampler import draw_uniform, sample_tokens
from rondel.generate.engine.builtin.speculative import PROBE, SpeculationController, SpeculativeDecoder, expected_tokens


def echoing(seed: int, n: int) -> list[int]:
    """A prompt that repeats itself, so that look-ups find something."""
    return (prompt(seed, max(3, n // 3)) * 4)[:n]


def quiet(e):
    idle(e)
    assert e.state == "serving", e.lifecycle.broken


def looking_up(model=MODEL, *, k=4, **settings):
    return watched(engine(model, speculation=SpeculativeDecoder(k, always=True), **settings))


def same(a, b):
    assert [(c.tokens, c.finish_reason, c.text) for c in a] == [(c.tokens, c.finish_reason, c.text) for c in b]
    for x, y in zip(a, b):
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-5)
        assert len(x.tokens) == len(x.logprobs) == len(x.versions)


# -- guesses -------------------------------------------------------------------------------------


def by_search(tokens, k):
    """The same by looking through everything."""
    for n in (4, 3, 2):
        for at in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[at - n : at] == tokens[-n:]:
                out = list(tokens)
                for i in range(k):
                    out.append(out[at + i])
                return out[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_a_search_finds(seed):
    rng = np.random.default_rng(seed)
    tokens, grams, at, found = rng.integers(0, 4, 200).tolist(), NgramIndex(), 0, 0
    while at < len(tokens):
        at += int(rng.integers(1, 6))
        k = int(rng.integers(1, 7))
        guess = grams.draft_tokens(tokens[:at], k)
        assert guess == by_search(tokens[:at], k)
        found += bool(guess)
    assert found > 5 and NgramIndex().draft_tokens([1, 2], 3) == [] and NgramIndex().draft_tokens([], 3) == []


def test_a_period_goes_on():
    assert NgramIndex().draft_tokens([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert NgramIndex().draft_tokens([9, 9, 9], 4) == [9, 9, 9, 9]


def test_agreeing():
    assert [matching_prefix_length([1, 2, 3], g) for g in ([], [1], [1, 2], [2, 2], [1, 3, 3])] == [0, 1, 2, 0, 1]


# -- the same tokens -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "k"), covering(product((0.0, 0.3, 0.7), (1, 4, 9)), [(0.0, 4), (0.3, 9), (0.7, 1)])
)
def test_look_ups_change_no_token(temperature, k):
    requests = [ask(echoing(i, 3 + 7 * i), key=i, n=40, temperature=temperature) for i in range(5)]
    requests += [ask(echoing(3, 24), key=10 + i, n=(1, 2, 40)[i], temperature=temperature, top_p=0.9) for i in range(3)]
    plain = asyncio.run(all_of(engine(MODEL), requests))
    e = looking_up(k=k)
    same(asyncio.run(all_of(e, requests)), plain)
    quiet(e)
    s = e.speculation
    assert s.rounds > 10 and 0 < s.accepted < s.proposed
    for request, c in zip(requests, plain):
        if request.sampling.top_p == 1:
            stated = plain_logprobs(MODEL, request.tokens + c.tokens, temperature=temperature or 1.0)
            assert c.logprobs == pytest.approx(stated[len(request.tokens) - 1 :], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["gemma3_text", "gpt2"], ["gemma3_text"]))
def test_windows_and_other_families(kind):
    how = {
        "gemma3_text": SIZE | dict(head_dim=16, sliding_window=12, layer_types=["sliding_attention", "full_attention"]),
        "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
    }
    model = tiny(kind, **how[kind])
    requests = [ask(echoing(i, 40), key=i, n=40, temperature=0.3) for i in range(4)]
    e = looking_up(model)
    same(asyncio.run(all_of(e, requests)), asyncio.run(all_of(engine(model), requests)))
    assert e.speculation.accepted > 0


@pytest.mark.slow
def test_groups_whose_prompt_is_shared():
    requests = [ask(echoing(g, 60), key=100 * g + i, n=40, temperature=0.4) for g in range(2) for i in range(4)]
    e = looking_up()
    same(asyncio.run(all_of(e, requests)), asyncio.run(all_of(engine(MODEL), requests)))
    assert e.scheduler.reused > 0 and e.speculation.accepted > 0
    again = asyncio.run(all_of(e, requests))  # from the tree: what is in it is what was written
    same(again, asyncio.run(all_of(engine(MODEL), requests)))
    quiet(e)


@cache
def accepted_run(k: int = 4) -> tuple[list[int], list[int], int]:
    """(prompt, answer, where a round begins whose first three guesses are right and three different tokens)."""
    for seed in range(60):
        given = echoing(seed, 20)
        tokens = asyncio.run(engine(MODEL).generate(ask(given, key=1, n=60, temperature=0.5))).tokens
        for at in range(2, len(tokens)):
            guess = NgramIndex().draft_tokens(given + tokens[:at], k)
            if matching_prefix_length(tokens[at:], guess) >= 3 and len(set(guess[:3]) | {tokens[at - 1]}) == 4:
                return given, tokens, at
    raise AssertionError("no round accepted three guesses: the test shows nothing")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end token", "stop id", "stop string", "max_tokens", "min_tokens"])
def test_an_end_in_the_middle_of_an_accepted_run(how):
    """What a look-up guesses stood there before, so the earlier occurrences are given: a sample that is continued."""
    model = tiny()
    p, free, at = accepted_run()
    # the last step of the prompt draws `first`, then one round draws the rest and ends inside
    first, end = at - 1, at + 1
    sampling: dict = dict(temperature=0.5)
    if how == "end token":
        model.stop_ids = frozenset([free[end]])
        sampling["ignore_eos"] = False
    elif how == "stop id":
        sampling["stop"] = (free[end],)
    elif how == "stop string":
        sampling["stop"] = (model.tokenizer.decode(free[end - 1 : end + 1]),)
    elif how == "min_tokens":  # the end is the first token that may be one, and guesses begin with it
        sampling |= dict(stop=(free[end],), min_tokens=2)
    request = ask(p + free[:first], key=1, n=3 if how == "max_tokens" else 40, **sampling)
    request = replace(request, continuation=first)
    plain = asyncio.run(engine(model).generate(request))
    assert plain.tokens == free[first : end + 1]
    e = looking_up(model)
    same([asyncio.run(e.generate(request))], [plain])
    quiet(e)
    assert e.speculation.accepted >= {"max_tokens": 1, "min_tokens": 0}.get(how, 2)


@pytest.mark.slow
def test_every_length_ends_where_it_should():
    p = echoing(2, 30)
    free = asyncio.run(engine(MODEL).generate(ask(p, key=1, n=40, temperature=0.2)))
    for n in range(1, 12):
        e = looking_up()
        c = asyncio.run(e.generate(ask(p, key=1, n=n, temperature=0.2)))
        assert c.tokens == free.tokens[:n] and c.finish_reason == "length"
        quiet(e)


@pytest.mark.slow
def test_what_changes_logits_or_asks_for_more_is_decoded_plainly():
    p, how = echoing(2, 30), dict(key=1, n=24, temperature=0.2)
    e = looking_up()
    asyncio.run(e.generate(ask(p, **how)))
    assert (rounds := e.speculation.rounds) > 0
    for request in (
        ask(p, **how, repetition_penalty=1.01), ask(p, **how, logit_bias={7: 0.01}), ask(p, **how, min_tokens=24),
        replace(ask(p, **how), wants=frozenset({"raw_logprobs"})), replace(ask(p, **how, top_k=5), wants=frozenset({"support"})),
    ):  # fmt: skip
        same([asyncio.run(e.generate(request))], [asyncio.run(engine(MODEL).generate(request))])
    assert e.speculation.rounds == rounds


def test_streams_hear_every_token_once():
    p, heard = echoing(2, 30), []
    e = looking_up()
    c = asyncio.run(e.generate(ask(p, key=1, n=40, temperature=0.2), on_token=lambda *told: heard.append(told)))
    assert (
        [t for t, *_ in heard] == c.tokens and [lp for _, lp, *_ in heard] == c.logprobs and e.speculation.accepted > 0
    )


def test_a_continuation_goes_on():
    p = echoing(7, 20)
    whole = asyncio.run(looking_up().generate(ask(p, key=5, n=40, temperature=0.3)))
    rest = replace(ask(p + whole.tokens[:12], key=5, n=28, temperature=0.3), continuation=12)
    assert asyncio.run(looking_up().generate(rest)).tokens == whole.tokens[12:]


# -- pages, pauses, weights ----------------------------------------------------------------------


@pytest.mark.slow
def test_oversubscribed_pages_change_no_token():
    requests = [ask(echoing(10 + i, 10 + i % 7), key=i, n=40, temperature=0.3) for i in range(16)]
    free = asyncio.run(all_of(engine(MODEL), requests))
    tight = looking_up(kv_pages=80)
    assert sum(len(r.tokens) + 40 for r in requests) >= 10 * tight.pages.count
    same(asyncio.run(asyncio.wait_for(all_of(tight, requests), 60)), free)
    assert tight.scheduler.retracted > 0 and tight.speculation.accepted > 0
    quiet(tight)


def test_guesses_evict_and_retract_nobody():
    p = echoing(2, 30)
    e = looking_up(kv_pages=30 + 20)
    c = asyncio.run(e.generate(ask(p, key=1, n=20, temperature=0.2)))
    assert c.tokens == asyncio.run(engine(MODEL).generate(ask(p, key=1, n=20, temperature=0.2))).tokens
    assert e.scheduler.retracted == 0
    quiet(e)


async def until(e, condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.slow
def test_hold_and_new_weights_in_the_middle():
    requests = [ask(echoing(i, 20), key=i, n=60, temperature=0.3) for i in range(4)]

    async def main(e):
        jobs = [asyncio.create_task(e.generate(r)) for r in requests]
        await until(e, lambda: any(live.written >= 20 for live in e.scheduler.running))
        counts = await renew(e)
        return await asyncio.gather(*jobs), counts

    e = looking_up()
    done, counts = asyncio.run(main(e))
    same(done, asyncio.run(all_of(engine(MODEL), requests)))
    for c, n in zip(done, counts):
        assert c.versions == [0] * n + [1] * (60 - n)
    assert all(root[0] == 1 for root in e.scheduler.caches[0].tree.roots)
    quiet(e)


@pytest.mark.slow
def test_abort_and_a_caller_that_leaves():
    requests = [ask(echoing(i, 20), key=i, n=60, temperature=0.3) for i in range(3)]
    free = asyncio.run(all_of(engine(MODEL), requests))

    async def main(e):
        jobs = [asyncio.create_task(e.generate(r)) for r in requests]
        await until(e, lambda: e.speculation.accepted > 3)
        jobs[0].cancel()
        await e.abort(lambda r: r.key == 1)
        return await asyncio.gather(*jobs, return_exceptions=True)

    e = looking_up()
    done = asyncio.run(main(e))
    assert isinstance(done[0], asyncio.CancelledError) and done[1].finish_reason == "abort"
    assert 0 < len(done[1].tokens) < 60 and done[1].tokens == free[1].tokens[: len(done[1].tokens)]
    assert done[2].tokens == free[2].tokens
    quiet(e)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(MOES, ["deepseek_v3"]))  # how others route: tests/units/test_routing.py
def test_routes_are_those_of_the_tokens_that_stayed(kind):
    model = tiny(kind, **MOES[kind])
    given = echoing(3, 24)
    requests = [replace(ask(given, key=i, n=40, temperature=0.2), wants=frozenset({"experts"})) for i in range(4)]
    e = looking_up(model, routes=True, kv_pages=150)
    done = asyncio.run(all_of(e, requests))
    same(done, asyncio.run(all_of(engine(model, routes=True), requests)))
    assert 0 < e.speculation.accepted < e.speculation.proposed
    for c in done:
        stream = given + c.tokens
        assert c.experts.shape == (len(stream) - 1, model.routers, 2)
        assert (np.sort(c.experts, -1) == own_routes(model, stream)[:-1]).all()
    quiet(e)


# -- a draft: another way to the same distribution -----------------------------------------------

WORDS = 5


def exact(model, given: list[int], sampling: Sampling, n: int) -> dict[tuple[int, ...], float]:
    """p of every sequence of n tokens, from plain forward passes."""
    odds = {(): 1.0}
    for _ in range(n):
        longer = {}
        for tokens, share in odds.items():
            p = truncated(plain_logits(model, given + list(tokens))[-1], sampling)
            longer |= {(*tokens, t): share * p[t] for t in np.flatnonzero(p)}
        odds = longer
    return odds


def near(model, seed: int = 5, share: float = 0.25):
    """The same model with noise on its weights: a draft that is often right."""
    model, g = twin(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.model.parameters():
            if p.dim() > 1:
                p.add_(torch.randn(p.shape, generator=g) * p.std() * share)
    return model


SAMPLINGS = [
    dict(top_k=WORDS, temperature=0.7),
    dict(top_k=WORDS, temperature=1.6),
    dict(top_p=0.5, top_k=WORDS + 6, temperature=1.3),
]


@pytest.mark.slow
@pytest.mark.parametrize("how", covering(SAMPLINGS, SAMPLINGS[2:]), ids=str)
def test_sequences_have_the_targets_distribution(how):
    """1,200 samples behind one prompt against the product of exact conditionals: their first
    four tokens, of which up to three are guessed.
    """
    model, given, n = tiny(), prompt(1, 6), 1200
    with torch.no_grad():
        model.head.weight.mul_(0.25)
    s = Sampling(max_tokens=5, ignore_eos=True, **how)
    odds = exact(model, given, s, 4)
    e = drafted(model, near(model), max_running=256)
    done = asyncio.run(all_of(e, [ask(given, key=sample_key(7, 0, i), n=5, **how) for i in range(n)]))
    names = sorted(odds)
    place = {tokens: i for i, tokens in enumerate(names)}
    counts = np.bincount([place[tuple(c.tokens[:4])] for c in done], minlength=len(names))
    values = chi_square(counts, np.array([odds[t] for t in names])), single(done, odds)
    share = e.speculation.accepted / e.speculation.proposed
    print(f"CHI {how} {len(names)} sequences p={values[0]:.3f}, last tokens p={values[1]:.3f}, accepted {share:.2f}")
    assert min(values) > 1e-3 and 0.2 < share < 0.9
    for c in done[:200]:
        assert math.exp(sum(c.logprobs[:4])) == pytest.approx(odds[tuple(c.tokens[:4])], rel=1e-4)
    quiet(e)


def single(done, odds) -> float:
    """The same for the fourth token alone."""
    counts, p = np.zeros(200, int), np.zeros(200)
    for c in done:
        counts[c.tokens[3]] += 1
    for tokens, share in odds.items():
        p[tokens[3]] += share
    return chi_square(counts, p)


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering(range(3), [0]))
def test_one_guess_is_a_draw_from_the_target(seed):
    """The rule alone, on made-up distributions: 20,000 rounds of guess, coin and draw after a rejection."""
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(12, generator=g) * (torch.rand(12, generator=g) < 0.8) + 1e-9 for _ in range(2))
    n, s = 20_000, Sampling()
    key = sample_key(seed, 1, 2)
    noise = {
        word: torch.tensor([draw_uniform(key, t, word) for t in range(n)], dtype=torch.float64) for word in (1, 2, 3)
    }
    rows_p, rows_q = p.repeat(n, 1), q.repeat(n, 1)
    guess = torch.tensor(sample_tokens(rows_q, [s] * n, noise[1].tolist())[0])
    stays = accept_draft_tokens(rows_p, rows_q, guess, noise[2])
    again = torch.tensor(sample_tokens(residual_weights(rows_p, rows_q), [s] * n, noise[3].tolist())[0])
    tokens = torch.where(stays, guess, again)
    whole_p, whole_q = p.double() / p.double().sum(), q.double() / q.double().sum()
    assert chi_square(np.bincount(tokens, minlength=12), whole_p.numpy()) > 1e-3
    alpha = float(torch.minimum(whole_p, whole_q).sum())
    assert float(stays.double().mean()) == pytest.approx(alpha, abs=4 * math.sqrt(alpha * (1 - alpha) / n))
    assert not bool((again[~stays] == guess[~stays]).any())


def test_a_distribution_is_left_over_from_itself():
    p = torch.rand(3, 7)
    assert torch.allclose(residual_weights(p, p), p.double() / p.double().sum(-1, keepdim=True))


def test_every_number_of_a_token_is_another():
    for key in (1, sample_key(0, 1, 2)):
        words = [draw_uniform(key, t, w) for t in range(500) for w in range(4)]
        assert len(set(words)) == 2000 and [draw_uniform(key, t) for t in range(500)] == words[::4]
        rows = np.array(words).reshape(-1, 4)
        assert (np.abs(np.corrcoef(rows.T) - np.eye(4)) < 0.2).all()


def constant(model, seed: int, spread: float):
    """A model that answers everything with the same distribution: its hidden states are made equal."""
    model = twin(model)
    with torch.no_grad():
        norm = model.model.base_model.norm.weight
        norm.zero_()
        model.head.bias = (
            torch.randn(model.head.weight.shape[0], generator=torch.Generator().manual_seed(seed)) * spread
        )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("k", covering([1, 3, 6], [3]))
def test_mean_tokens_of_a_round(k):
    """With p and q the same everywhere acceptance is i.i.d. with alpha = sum of min(p, q): (1
    - alpha^(k+1)) / (1 - alpha) tokens a round.
    """
    model, draft = constant(MODEL, 1, 1.0), constant(tiny("llama", **LITTLE), 2, 0.5)
    p, q = model.head.bias.softmax(-1), draft.head.bias.softmax(-1)
    alpha = float(torch.minimum(p, q).sum())
    e = drafted(model, draft, k=k, max_running=48)
    done = asyncio.run(all_of(e, [ask([5, 6], key=i, n=60) for i in range(48)]))
    s = e.speculation
    measured = (s.accepted + s.rounds) / s.rounds
    print(
        f"ROUNDS k={k} alpha={alpha:.3f} expected {expected_tokens(alpha, k):.3f} measured {measured:.3f} of {s.rounds}"
    )
    assert 0.3 < alpha < 0.9 and measured == pytest.approx(expected_tokens(alpha, k), rel=0.05)
    counts = np.bincount([t for c in done for t in c.tokens], minlength=len(p))
    assert chi_square(counts, p.double().numpy() / float(p.double().sum())) > 1e-3


@pytest.mark.slow
def test_a_draft_that_is_the_model_is_always_right():
    requests = [ask(prompt(i, 5 + 9 * i), key=i, n=40, temperature=0.8) for i in range(5)]
    e = drafted(MODEL, twin(MODEL), k=4, prefill_tokens=16)
    done = asyncio.run(all_of(e, requests))
    s = e.speculation
    assert s.rounds > 20 and s.accepted == s.proposed
    for r, c in zip(requests, done):
        assert c.logprobs == pytest.approx(
            plain_logprobs(MODEL, r.tokens + c.tokens, temperature=0.8)[len(r.tokens) - 1 :], abs=1e-5
        )
    quiet(e)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    covering(
        [dict(), dict(temperature=0.7, top_p=0.9), dict(temperature=0.0)],
        [dict(temperature=0.7, top_p=0.9)],
    ),
    ids=str,
)
def test_stored_logprobs_are_the_targets(how):
    draft = tiny("llama", **LITTLE)
    requests = [ask(prompt(i % 3, 5 + 9 * (i % 3)), key=i, n=24, **how) for i in range(6)]
    tight = drafted(MODEL, draft, kv_pages=70, prefill_tokens=16)
    done = asyncio.run(all_of(tight, requests))
    assert tight.scheduler.retracted > 0 and tight.speculation.rounds > 0
    s = requests[0].sampling
    for r, c in zip(requests, done):
        logits = plain_logits(MODEL, r.tokens + c.tokens)[len(r.tokens) - 1 : -1]
        for row, token, logprob in zip(logits, c.tokens, c.logprobs):
            p = truncated(row, s if s.temperature else Sampling())
            assert math.log(p[token]) == pytest.approx(logprob, abs=1e-5)
    if not s.temperature:
        assert [c.tokens for c in done] == [c.tokens for c in asyncio.run(all_of(engine(MODEL), requests))]
    quiet(tight)


async def renew(e, draft=None):
    """The same weights again under the next version, as a sync brings them; and other
    weights of the draft, as training does.
    """
    await e.pause("hold")
    counts = [live.written for live in e.scheduler.running]
    assert all(
        not live.ahead and not live.guess and live.pending_tokens == 1 for live in e.scheduler.running if live.written
    )
    e.scheduler.check_invariants()
    if draft is not None:
        draft.model.load_state_dict(near(draft, 9, 1.0).model.state_dict())
    await publish_in_place(e, e.version + 1)
    await e.resume()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("pages", covering([4096, 100], [100]))
def test_what_the_draft_knows_is_what_it_would_compute(pages):
    """Its guesses do not depend on how its cache came about: pages that were others'
    before, times when it was off, new weights.
    """
    draft = near(MODEL, share=0.1)
    weights_by_version = {0: twin(draft)}
    e = drafted(MODEL, draft, kv_pages=pages)
    rounds, note = [], e.speculation.record_step

    def noting(plan, drawn, seconds):
        rounds.extend((e.version, list(live.tokens), list(live.guess)) for live in plan.decoding if live.guess)
        note(plan, drawn, seconds)

    e.speculation.record_step = noting

    async def main():
        jobs = [asyncio.create_task(e.generate(ask(prompt(i, 12), key=i, n=60, temperature=0.0))) for i in range(4)]
        written = lambda n: until(e, lambda: any(live.written > n for live in e.scheduler.running))  # noqa: E731
        await written(15)
        e.speculation.pays.k = 0
        await written(30)
        e.speculation.pays.k = 3
        await written(40)
        await renew(e, draft)
        weights_by_version[1] = twin(draft)
        await asyncio.gather(*jobs)

    asyncio.run(main())
    assert {version for version, _, _ in rounds} == {0, 1} and e.speculation.accepted > 20
    assert pages > 100 or e.scheduler.retracted > 0
    for version, tokens, guess in rounds[::7]:
        best = plain_logits(weights_by_version[version], tokens + guess)[len(tokens) - 1 : -1].argmax(-1)
        assert guess == best.tolist()
    quiet(e)


@pytest.mark.slow
def test_a_draft_whose_numbers_overflow_costs_its_guesses_and_nothing_else():
    requests = [ask(prompt(i, 12), key=i, n=20) for i in range(4)]
    plain = asyncio.run(all_of(engine(MODEL), requests))
    draft = near(MODEL)
    good = draft.head.weight.detach().clone()
    with torch.no_grad():
        draft.head.weight[7] = math.inf
    e, told = drafted(MODEL, draft), []
    stop = subscribe(told.append)
    same(asyncio.run(all_of(e, requests)), plain)
    stop()
    warned = [event.message for event in told if isinstance(event, Warned)]
    assert len(warned) == 1 and "guesses nothing until it gets new weights" in warned[0] and e.speculation.rounds == 0
    with torch.no_grad():
        draft.head.weight.copy_(good)
    e.speculation.draft.forget_cache()
    asyncio.run(all_of(e, [replace(r, key=r.key + 50) for r in requests]))
    assert e.speculation.rounds > 0
    quiet(e)


def test_a_draft_with_other_words_is_refused():
    draft = tiny("llama", **LITTLE)
    draft.tokenizer = copy.deepcopy(draft.tokenizer)
    draft.tokenizer.add_tokens(["another"])
    with pytest.raises(ConfigError, match=r"another vocabulary.*1 words differ, first 'another'"):
        drafted(MODEL, draft)
    with pytest.raises(ConfigError, match="carries 64 positions"):
        drafted(MODEL, tiny("llama", **LITTLE | {"max_position_embeddings": 64}))


# -- whether it pays -----------------------------------------------------------------------------


def served(pays, *, a, b, c=0.0, alpha, running=4, guessing=4, steps=300):
    """The controller in a made-up world. -> the k of the last half of the steps."""
    ks, rng = [], np.random.default_rng(0)
    for _ in range(steps):
        k = pays.choose_draft_length(running, guessing)
        ks.append(k)
        for _ in range(guessing if k else 0):
            stays = int((rng.random(k) < alpha).cumprod().sum())
            pays.update_acceptance(min(stays + 1, k), stays)
        tokens = running + guessing * k
        pays.record_step_time(tokens, a + b * tokens + c * k, k=k, draft=c * k)
    return ks[steps // 2 :]


def usual(ks):
    return max(set(ks), key=ks.count)


def test_it_guesses_as_long_as_that_pays():
    free = served(SpeculationController(4), a=1.0, b=0.0, alpha=0.8)
    assert usual(free) == 4
    dear = served(
        SpeculationController(4), a=0.01, b=1.0, alpha=0.5
    )  # every token costs as much as a step: guesses that fail are lost
    assert usual(dear) == 0 and sum(map(bool, dear)) <= len(dear) / PROBE + 1
    useless = served(SpeculationController(4), a=1.0, b=0.02, alpha=0.02)
    assert usual(useless) == 0
    slow_draft = served(SpeculationController(4), a=1.0, b=0.01, c=1.0, alpha=0.6)
    assert usual(slow_draft) == 0
    between = served(SpeculationController(8), a=1.0, b=0.05, alpha=0.7)
    best = max(range(9), key=lambda k: (4 * expected_tokens(0.7, k)) / (1 + 0.05 * 4 * (1 + k)))
    assert 0 < best < 8 and abs(usual(between) - best) <= 1


def test_it_notices_when_the_world_changes():
    pays = SpeculationController(4)
    assert usual(served(pays, a=1.0, b=0.05, alpha=0.02)) == 0
    assert usual(served(pays, a=1.0, b=0.05, alpha=0.95, steps=600)) >= 3
    assert usual(served(pays, a=1.0, b=0.05, alpha=0.02, steps=600)) == 0


def test_the_mean_of_a_round():
    for alpha in (0.0, 0.3, 0.9, 1.0):
        for k in range(6):
            assert expected_tokens(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)))


@pytest.mark.slow
def test_switching_off_changes_no_token():
    """The controller looks at the clock, so it may decide otherwise every time."""
    requests = [ask(echoing(i, 30), key=i, n=60, temperature=0.5) for i in range(6)]
    plain = asyncio.run(all_of(engine(MODEL), requests))
    e = watched(engine(MODEL, speculation=SpeculativeDecoder(4)))
    flips = np.random.default_rng(3)

    class Fickle(SpeculationController):
        def choose_draft_length(self, running, guessing):
            return int(flips.integers(0, 5))

    e.speculation.pays = Fickle(4)
    same(asyncio.run(all_of(e, requests)), plain)
    same(asyncio.run(all_of(watched(engine(MODEL, speculation=SpeculativeDecoder(4))), requests)), plain)
    assert e.speculation.accepted > 0
