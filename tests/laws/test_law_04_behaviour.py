"""Law 4, behaviour: the log-probability stored for a token is that of the distribution it was drawn from, after
temperature, top-k, top-p, penalties and grammar. The trainer's recompute agrees, with aligned numerics bit for bit.

Penalties, grammar and the raw streams are in tests/units/test_sampling.py, the recorded support in test_support.py.
"""

from __future__ import annotations

import asyncio
import math
import random
from itertools import product

import numpy as np
import pytest
import torch

from kits import aligned
from kits.engine import SIZE, all_of, ask, engine, idle, plain_logits, plain_logprobs, prompt, tiny
from kits.runs import run, steps
from kits.sampling import chi_square, draw, reference
from kits.sweeps import covering
from rondel.core.errors import EngineError
from rondel.core.types import Sampling, sample_key
from rondel.generate.engine.builtin.sampler import _inverse_cdf, draw_uniform
from rondel.train.annotate import annotate_logprobs

WINDOW = dict(head_dim=16, sliding_window=12, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "llama": SIZE,
    "qwen3": SIZE | {"head_dim": 16},
    "gemma3_text": SIZE | WINDOW,
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
}


# -- stored logprob = logprob of a plain forward ---------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "temperature"),
    covering(product(FAMILIES, (1.0, 0.7)), [*product(FAMILIES, (1.0,)), ("llama", 0.7)]),
)
def test_stored_logprobs_are_those_of_a_plain_forward(kind, temperature):
    model = tiny(kind, **FAMILIES[kind])
    e = engine(model, prefill_tokens=20)
    requests = [ask(prompt(i, 3 + 9 * i), key=i, n=40, temperature=temperature) for i in range(4)] + [
        ask(prompt(3, 30), key=9, n=40, temperature=temperature)
    ]
    worst = 0.0
    for request, c in zip(requests, asyncio.run(all_of(e, requests))):
        expected = plain_logprobs(model, request.tokens + c.tokens, temperature=temperature)[len(request.tokens) - 1 :]
        worst = max(worst, *(abs(a - b) for a, b in zip(c.logprobs, expected, strict=True)))
        # neither uniform nor certain: the test can fail
        assert min(expected) < -1 and max(expected) > min(expected) + 1
    print(f"GAP {kind} T={temperature} {worst:.2e}")
    assert worst <= 1e-5
    idle(e)


@pytest.mark.parametrize(
    "how", [dict(top_k=7), dict(top_p=0.8), dict(min_p=0.1), dict(top_k=20, top_p=0.9, min_p=0.05, temperature=1.3)]
)
def test_truncated_logprobs_are_those_of_the_kept_support(how):
    model = tiny()
    p = prompt(1, 12)
    c = asyncio.run(engine(model).generate(ask(p, n=30, **how)))
    logits = plain_logits(model, p + c.tokens)[len(p) - 1 : -1]
    for row, token, logprob in zip(logits, c.tokens, c.logprobs):
        kept = reference(row, Sampling(**how))
        assert kept[token] > 0 and math.log(kept[token]) == pytest.approx(logprob, abs=1e-5)


def test_greedy_takes_the_largest_and_states_its_plain_logprob():
    model, p = tiny(), prompt(4, 15)
    c = asyncio.run(engine(model).generate(ask(p, n=20, temperature=0.0, top_k=1)))
    assert c.tokens == plain_logits(model, p + c.tokens)[len(p) - 1 : -1].argmax(-1).tolist()
    assert c.logprobs == pytest.approx(plain_logprobs(model, p + c.tokens)[len(p) - 1 :], abs=1e-5)


def test_score_is_a_plain_forward():
    model = tiny()
    from rondel.core.types import Request

    for n in (1, 2, 40):
        scored = asyncio.run(engine(model, kv_pages=1).score(Request(prompt(2, n))))
        assert scored.logprobs == pytest.approx(
            [0.0, *plain_logprobs(model, prompt(2, n))] if n > 1 else [0.0], abs=1e-5
        )


# -- the sampler draws what it states --------------------------------------------------------------

DRAWS = 10_000


TRANSFORMS = [
    dict(), dict(temperature=0.6), dict(temperature=1.7), dict(top_k=9), dict(top_p=0.85), dict(min_p=0.04),
    dict(temperature=0.8, top_k=30, top_p=0.9), dict(top_k=25, top_p=0.95, min_p=0.03), dict(temperature=1.4, top_p=0.7, min_p=0.02),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocab, how", [(v, how) for v in (50, 1000) for how in (TRANSFORMS if v == 50 else TRANSFORMS[::3])], ids=str
)
def test_draws_have_the_stated_distribution(vocab, how):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    s = Sampling(**how)
    tokens, logprobs = [], []
    for first in range(0, DRAWS, 5000):
        noise = [draw_uniform(sample_key(vocab, 0, TRANSFORMS.index(how)), t) for t in range(first, first + 5000)]
        drawn = draw(logits.repeat(5000, 1), [s] * 5000, noise)
        tokens += drawn[0]
        logprobs += drawn[1]
    kept = reference(logits, s)
    stated = {t: math.exp(lp) for t, lp in zip(tokens, logprobs)}
    assert all(kept[t] == pytest.approx(p, rel=1e-5) for t, p in stated.items()), (
        "a token outside the support, or a wrong logprob"
    )
    counts = np.bincount(tokens, minlength=vocab)
    p_value = chi_square(counts, kept)
    print(f"CHI {vocab} {how} p={p_value:.3f}")
    assert p_value > 1e-3


EDGES = [0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-24, 1 - 2.0**-53]


@pytest.mark.parametrize("vocab", [3, 50, 255, 256, 257, 600, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_no_noise_leads_out_of_the_support(vocab, seed):
    """Zeros at the beginning, at the end, in whole blocks; the lowest and highest uniform there is."""
    g = torch.Generator().manual_seed(seed)
    rows = [torch.rand(vocab, generator=g) * (torch.rand(vocab, generator=g) < share) for share in (0.02, 0.3, 1.0)]
    for at in {0, vocab - 1, vocab // 2}:  # a support of one token
        rows.append(torch.zeros(vocab).index_fill_(0, torch.tensor([at]), 0.7))
    rows.append(torch.rand(vocab, generator=g) * (torch.arange(vocab) < vocab // 3 + 1))  # zeros at the end
    rows.append(torch.rand(vocab, generator=g) * (torch.arange(vocab) > vocab // 2))  # zeros at the beginning
    for row in rows:
        row[vocab // 2 + 1 if vocab > 3 else 2] = max(float(row.max()), 1e-3)
        noise = EDGES + [float(u) for u in torch.rand(50, generator=g, dtype=torch.float64)]
        drawn, logprobs = draw(row.log().repeat(len(noise), 1), [Sampling()] * len(noise), noise)
        assert all(row[t] > 0 for t in drawn) and drawn[0] == int(row.nonzero()[0, 0])
        assert logprobs == pytest.approx((row[drawn].double() / row.double().sum()).log().tolist(), abs=1e-5)
        cumulative = (row / row.max()).double().cumsum(0)
        exact = torch.searchsorted(
            cumulative, torch.tensor(noise, dtype=torch.float64) * cumulative[-1], right=True
        ).tolist()
        assert drawn[len(EDGES) :] == exact[len(EDGES) :]


def test_the_inverse_of_the_cumulative_distribution_by_hand():
    p = torch.zeros(1, 600)
    p[0, 3], p[0, 255], p[0, 256], p[0, 599] = 1.0, 2.0, 0.5, 0.5
    for u, token in (
        (0, 3),
        (0.2499, 3),
        (0.25, 255),
        (0.7499, 255),
        (0.75, 256),
        (0.8749, 256),
        (0.875, 599),
        (1 - 2.0**-53, 599),
    ):
        assert int(_inverse_cdf(p, torch.tensor([u], dtype=torch.float64))[0]) == token


def test_logits_that_are_not_finite_are_an_error():
    for bad in (math.nan, math.inf):
        logits = torch.zeros(2, 9)
        logits[1, 4] = bad
        with pytest.raises(EngineError, match="not finite"):
            draw(logits, [Sampling()] * 2, [0.5, 0.5])
    masked = torch.zeros(1, 9)
    masked[0, 4] = -math.inf  # a forbidden token is fine
    assert draw(masked, [Sampling()], [0.5])[1] == pytest.approx([-math.log(8)])


def test_rows_of_one_batch_do_not_touch_each_other():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5)) * 3
    hows = [Sampling(), Sampling(temperature=0.5, top_k=3), Sampling(temperature=0.0), Sampling(top_p=0.3)]
    noise = [0.1, 0.9, 0.4, 0.7]
    together = draw(logits.clone(), hows, noise)
    alone = [draw(logits[i : i + 1].clone(), [hows[i]], [noise[i]]) for i in range(4)]
    assert together[0] == [a[0][0] for a in alone] and together[1] == pytest.approx([a[1][0] for a in alone], abs=1e-6)


# -- noise -----------------------------------------------------------------------------------------


def test_uniform_is_philox():
    for key in (0, 1, 2**64 + 5, 2**128 - 1, sample_key(0, 1, 2)):
        for t in (0, 1, 7, 100_000):
            random = np.random.Generator(np.random.Philox(key=key, counter=t)).random()
            assert draw_uniform(key, t) == random and 0 <= random < 1
            block = np.random.Philox(key=key, counter=t).random_raw(4)
            assert [draw_uniform(key, t, word) for word in range(4)] == [(int(raw) >> 11) * 2.0**-53 for raw in block]
    many = np.array([draw_uniform(sample_key(0, 0, i), t) for i in range(100) for t in range(100)])
    assert abs(many.mean() - 0.5) < 0.01 and abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03


@pytest.mark.slow
def test_scheduling_changes_no_token():
    model = tiny()
    requests = [
        ask(prompt(i, 6 + 5 * i), key=1000 + i, n=25, temperature=0.9, top_p=(1.0, 0.9)[i % 2]) for i in range(8)
    ]
    alone = [asyncio.run(engine(model).generate(r)) for r in requests]
    batch = asyncio.run(all_of(engine(model), requests))
    reverse = asyncio.run(all_of(engine(model), requests[::-1]))[::-1]
    tight = engine(model, kv_pages=90, prefill_tokens=9, max_running=5)
    pressed = asyncio.run(all_of(tight, requests))
    assert tight.scheduler.retracted > 0
    for other in (batch, reverse, pressed):
        assert [c.tokens for c in other] == [c.tokens for c in alone]
        assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for a, b in zip(other, alone))


def test_a_continuation_goes_on_where_the_noise_stopped():
    """An aborted sample that is sent again with what it wrote draws what it would have drawn."""
    from dataclasses import replace

    model, p = tiny(), prompt(7, 20)
    whole = asyncio.run(engine(model).generate(ask(p, key=5, n=30)))
    rest = replace(ask(p + whole.tokens[:12], key=5, n=18), continuation=12)
    assert asyncio.run(engine(model).generate(rest)).tokens == whole.tokens[12:]


@pytest.mark.parametrize(
    "how, wrote, reason",
    [
        (dict(ignore_eos=False), 4, "stop"),
        (dict(ignore_eos=True), 10, "length"),
        (dict(ignore_eos=True, stop="second"), 2, "stop"),  # only the model's own end tokens are ignored
    ],
)
def test_where_a_sample_ends(how, wrote, reason):
    model, p = tiny(), prompt(8, 9)
    free = asyncio.run(engine(model).generate(ask(p, key=1, n=10))).tokens
    model.stop_ids = frozenset([free[3]])
    assert free[3] not in free[:3] + free[4:] and free[1] not in free[:1]
    if "stop" in how:
        how = how | {"stop": (free[1],)}
    c = asyncio.run(engine(model).generate(ask(p, key=1, n=10, **how)))
    assert (c.tokens, c.finish_reason) == (free[:wrote], reason)


# -- aligned numerics: the same bits ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    # a family is another order of products, a dtype another kernel: llama in one, what differs from it most in the other;
    # the trainer's recompute (below) is another batch for every family
    covering(
        [*((kind, "bfloat16") for kind in aligned.FAMILIES), *((kind, "float32") for kind in ("llama", "gpt2"))],
        [("gemma2", "bfloat16"), ("llama", "float32")],
    ),
)
@pytest.mark.slow
def test_the_same_bits_in_every_batch_chunking_and_cache_state(kind, dtype):
    loaded = aligned.model(kind, dtype)
    asks = aligned.requests()
    alone = [c for r in asks for c in asyncio.run(all_of(engine(loaded), [r]))]
    for settings in ({"max_running": 3, "prefill_tokens": 7}, {"kv_pages": 170, "prefill_tokens": 16}):
        e = engine(loaded, **settings)
        order = random.Random(repr(settings)).sample(range(len(asks)), len(asks))
        # the second time everything is found in the cache; with few pages some of it, in any family
        for _ in range(2 if "max_running" in settings or kind == "llama" else 1):
            done = asyncio.run(all_of(e, [asks[i] for i in order]))
            assert aligned.told(done) == [(alone[i].tokens, alone[i].logprobs) for i in order], settings
        idle(e)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "temperature"),
    # a temperature is one operation on the logits, whatever the family made them; a dtype another kernel
    covering(
        [*product(aligned.FAMILIES, aligned.DTYPES, [1.0]), *product(["llama"], aligned.DTYPES, [0.7])],
        [*product(aligned.FAMILIES, ["bfloat16"], [1.0]), ("llama", "float32", 0.7)],
    ),
)
def test_the_trainer_recomputes_the_same_bits(kind, dtype, temperature):
    loaded = aligned.model(kind, dtype)
    asks = aligned.requests(temperature)
    done = asyncio.run(all_of(engine(loaded), asks))
    rollouts = aligned.batch_of(asks, done)
    for budget, share in ((64, True), (4096, False)):
        annotate_logprobs(loaded, rollouts, "start", budget=budget, temperature=temperature, share=share)
        for sample in rollouts.samples:
            assert np.array_equal(sample.known.start.numpy(), sample.known.behavior.numpy()), (budget, share)


@pytest.mark.slow
def test_fast_numerics_do_not_have_this_property():
    """Else the tests above would prove nothing."""
    loaded = aligned.model("llama", "bfloat16")
    loaded.aligned = False
    asks = aligned.requests()
    done = asyncio.run(all_of(engine(loaded), asks))
    rollouts = aligned.batch_of(asks, done)
    annotate_logprobs(loaded, rollouts, "start", budget=4096, temperature=1.0)
    assert any(not np.array_equal(s.known.start.numpy(), s.known.behavior.numpy()) for s in rollouts.samples)


@pytest.mark.slow
def test_a_run_with_aligned_numerics_has_a_gap_of_zero(tmp_path):
    run(tmp_path / "run", engine__numerics="aligned", loop__warmup__steps=1, loop__steps=2)
    gaps = [metrics["train/gap_max"] for _, _, metrics, _ in steps(tmp_path / "run") if "train/gap_max" in metrics]
    assert gaps and max(gaps) == 0.0
