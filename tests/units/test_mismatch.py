"""The distance of trainer and engine: against naive sums, against the closed form of Gaussian noise, and its alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rondel.algos.tokens import TokenBatch
from rondel.runtime.telemetry.metrics import SCHEMA, metric_meaning
from rondel.train.pack import TrainSample
from rondel.train.step_metrics import (
    BOUNDS,
    MIXTURE,
    ROUNDED,
    MismatchAlarm,
    bound_of,
    measure_mismatch,
    mismatch_metrics,
)


def naive(x, mu, sample, mask):
    """Token by token in Python floats."""
    kept = [(a, m, int(s)) for a, m, s, k in zip(x.tolist(), mu.tolist(), sample.tolist(), mask.tolist()) if k]
    w = [math.exp(a) for a, _, _ in kept]
    answers = {s: [a for a, _, t in kept if t == s] for _, _, s in kept}
    whole = [math.exp(sum(a)) for a in answers.values()]
    difference = [abs(math.exp(m + a) - math.exp(m)) for a, m, _ in kept]
    mean = sum(w) / len(w)
    return {
        "k3": sum(v - 1 - math.log(v) for v in w) / len(w),
        "probability_mean": sum(difference) / len(w),
        "probability_max": max(difference),
        "perplexity_ratio": sum(math.exp(-sum(a) / len(a)) for a in answers.values()) / len(answers),
        "chi2_token": sum(v * v - 1 for v in w) / len(w),
        "chi2_sample": sum(v * v - 1 for v in whole) / len(whole),
        "ess_token": sum(w) ** 2 / sum(v * v for v in w) / len(w),
        "ess_sample": sum(whole) ** 2 / sum(v * v for v in whole) / len(whole),
        "weight_mean": mean,
        "weight_std": math.sqrt(sum((v - mean) ** 2 for v in w) / len(w)),
        "weight_max": max(w),
    }


@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0, 2))
def test_each_number_is_its_formula(seed, tokens, size):
    g = torch.Generator().manual_seed(seed)
    x = size * torch.randn(tokens, generator=g, dtype=torch.float64)
    mu = -torch.rand(tokens, generator=g, dtype=torch.float64) * 5 - 1e-3
    sample, mask = torch.randint(0, 5, (tokens,), generator=g), torch.rand(tokens, generator=g) < 0.8
    got = mismatch_metrics(x, mu, sample, mask)
    if not mask.any():
        assert got == {}
        return
    want = naive(x, mu, sample, mask)
    assert got.keys() == want.keys() and all(f"train/mismatch_{name}" in SCHEMA for name in got)
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert got["k3"] >= 0 and 0 < got["ess_token"] <= 1 + 1e-12 and 0 < got["ess_sample"] <= 1 + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.01, 0.05, 0.2])
def test_the_k3_of_gaussian_logit_noise_is_predicted(size):
    """logits + s·noise: KL = s²/2·(1 - Σp²) to second order, and the estimate from drawn tokens
    finds it within 10 %.
    """
    g = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(100_000, 32, generator=g, dtype=torch.float64)
    noisy = logits + size * torch.randn(logits.shape, generator=g, dtype=torch.float64)
    engine, trainer = logits.log_softmax(-1), noisy.log_softmax(-1)
    drawn = engine.exp().multinomial(1, generator=g)
    mu, pi = engine.gather(1, drawn)[:, 0], trainer.gather(1, drawn)[:, 0]
    got = mismatch_metrics(pi - mu, mu, torch.arange(len(mu)) // 100, torch.ones(len(mu), dtype=torch.bool))
    predicted = size**2 / 2 * float((1 - engine.exp().square().sum(-1)).mean())
    assert got["k3"] == pytest.approx(predicted, rel=0.1)
    # the mean of 2x is noise of size s
    assert got["chi2_token"] == pytest.approx(2 * predicted, rel=0.2, abs=4 * size / 300)
    assert got["weight_mean"] == pytest.approx(1, abs=4 * size / 300)  # the weights of tokens that were drawn from mu


def test_two_equal_policies_and_two_far_ones_are_numbers():
    mu, sample = torch.full((6,), -1.0), torch.tensor([0, 0, 0, 1, 1, 1])
    same = mismatch_metrics(torch.zeros(6), mu, sample, torch.ones(6, dtype=torch.bool))
    assert same["k3"] == same["chi2_sample"] == same["probability_max"] == same["weight_std"] == 0
    assert same["ess_sample"] == same["perplexity_ratio"] == same["weight_mean"] == 1
    for far in (-1e3, 1e3):
        assert all(
            map(
                math.isfinite,
                mismatch_metrics(
                    torch.full((6,), far), mu - abs(far), sample, torch.ones(6, dtype=torch.bool)
                ).values(),
            )
        )


def sample(gaps, versions):
    n = len(gaps)
    behavior = np.full(n, -1.0, np.float32)
    known = TokenBatch(
        torch.zeros(n, dtype=torch.int64), behavior=torch.from_numpy(behavior), versions=torch.as_tensor(versions)
    )
    s = TrainSample(0, 0, np.arange(n + 1), np.arange(1, n + 1), 1.0, known)
    s.known.trained = torch.as_tensor(behavior + np.asarray(gaps, np.float32))
    return s


def test_by_position_and_by_version():
    """Two samples of 20 tokens, two in each tenth: a fresh one that is off, and one that was
    held over an update, which is as old as its first token: its later ones were drawn with
    keys and values of the weights before, and
    that is no fault of trainer or engine."""
    off = [0.5] * 20
    k3 = math.exp(0.5) - 1.5
    got = measure_mismatch([sample([0.0] * 20, [6] * 10 + [7] * 10), sample(off, [7] * 20)], 7)
    assert got["train/mismatch_k3_lag_1"] == 0 and got["train/mismatch_k3_lag_0"] == pytest.approx(k3)
    got = measure_mismatch([sample([0.0] * 10 + [0.5] * 10, [7] * 20)], 7)
    assert [got[f"train/mismatch_k3_tenth_{i}"] for i in range(1, 11)] == pytest.approx([0] * 5 + [k3] * 5)
    assert got["train/mismatch_k3"] == pytest.approx(k3 / 2) and all(metric_meaning(name) for name in got)
    assert measure_mismatch([], 7) == {}
    assert {name for name in measure_mismatch([sample([0.1, 0.2, 0.3], [7] * 3)], 7) if "tenth" in name} == {
        f"train/mismatch_k3_tenth_{i}" for i in (1, 4, 7)
    }


def test_the_alarm_speaks_once_a_crossing_and_of_fresh_tokens_only():
    alarm = MismatchAlarm(1e-3)
    fresh = [1e-5, 2e-3, 5e-3, 1e-4, 2e-3, math.nan]
    assert [
        bool(alarm.check_metrics({"train/mismatch_k3_lag_0": k3, "train/mismatch_k3_lag_1": 9.0})) for k3 in fresh
    ] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert not MismatchAlarm(1e-3).check_metrics({"train/mismatch_k3_lag_1": 9.0})
    assert "model.dtype" in MismatchAlarm(1e-3).check_metrics({"train/mismatch_k3_lag_0": 1.0})


def test_a_healthy_run_of_any_precision_is_silent_and_a_worse_one_is_not():
    """Measured noise of two healthy programs, in nats a token, of SmolLM2: 2e-3 in bfloat16 (vLLM beside transformers,
    too), 6e-4 with sums in float32, 1e-12 in float32.
    """
    for dtype, rounded, noise, broken in (
        (torch.bfloat16, True, 2.2e-3, 0.03),
        (torch.bfloat16, False, 1.2e-3, 0.01),
        (torch.float32, True, 1e-12, 1e-5),
        (torch.float16, True, 4e-5, 1e-3),
        (torch.float16, False, 8e-6, 2e-4),
    ):
        bound = bound_of(dtype, mixture=False, foreign=False, rounded=rounded)
        assert not MismatchAlarm(bound).check_metrics({"train/mismatch_k3_lag_0": noise}) and MismatchAlarm(
            bound
        ).check_metrics({"train/mismatch_k3_lag_0": broken})
    assert bound_of(torch.float32, mixture=False, foreign=True) == bound_of(
        torch.bfloat16, mixture=False, foreign=False, rounded=True
    )
    assert bound_of(torch.float32, mixture=True, foreign=False) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_alone_stays_below_the_bound(dtype):
    """Logits of a large vocabulary, computed twice in one precision in another order of
    summation: their K3 by the definition.
    """
    draw = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(64, 576, generator=draw), torch.randn(4096, 576, generator=draw) / 8
    order = torch.randperm(576, generator=draw)
    twice = [
        (h.to(dtype).float() @ w.to(dtype).float().T).to(dtype).float()
        for h, w in ((hidden, head), (hidden[:, order], head[:, order]))
    ]
    twice[1] = (
        (twice[1] + torch.finfo(dtype).eps * twice[1].abs() * torch.randn(twice[1].shape, generator=draw) / 3)
        .to(dtype)
        .float()
    )
    mu, pi = (logits.log_softmax(-1) for logits in twice)
    token = mu.exp().multinomial(1, generator=draw)
    x = (pi - mu).gather(1, token).squeeze(1)
    found = mismatch_metrics(
        x, mu.gather(1, token).squeeze(1), torch.zeros(64, dtype=torch.long), torch.ones(64, dtype=torch.bool)
    )
    # the logits themselves are rounded here
    assert 0 <= found["k3"] < bound_of(dtype, mixture=False, foreign=False, rounded=True)


def test_what_the_metric_says_of_its_bounds_is_what_they_are():
    _, told = metric_meaning("train/mismatch_k3_lag_0")
    for bound in (*BOUNDS.values(), *ROUNDED.values(), MIXTURE):
        assert f"{bound:g} " in told.replace(",", " "), bound
    assert "1e-3" not in metric_meaning("train/gap_max")[1]
