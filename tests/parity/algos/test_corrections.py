"""Weights for tokens of another policy: table-driven cases, laws, bias and variance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kits.algos import F64, near, tensor
from rondel.algos.correction import Importance, NoCorrection, OffPolicyMask
from rondel.core.errors import ConfigError


def test_truncation_holds_above_and_carries_no_gradient():
    log_weight = tensor(0, math.log(1.5), math.log(2.5), math.log(0.1), 900).requires_grad_()
    weight = Importance()(log_weight, torch.zeros(5, dtype=torch.int64), log_weight)
    assert near(weight, [1, 1.5, 2, 0.1, 2]) and not weight.requires_grad


def test_truncation_adds_bias_and_takes_variance():
    """Drawing from mu and asking for the mean of f under pi: exact without the cap, biased towards mu with it."""
    mu, pi, f = tensor(0.7, 0.2, 0.1), tensor(0.1, 0.2, 0.7), tensor(0, 1, 3)
    sample = torch.zeros(3, dtype=torch.int64)
    log_weight, truth = (pi / mu).log(), (pi * f).sum()
    means, spreads = [], []
    for cap in (100.0, 2.0, 1.0):
        value = Importance(high=cap)(log_weight, sample, log_weight) * f
        means.append((mu * value).sum())
        spreads.append((mu * value.square()).sum() - means[-1] ** 2)
    assert near(means[0], truth) and means[0] > means[1] > means[2]
    assert spreads[0] > spreads[1] > spreads[2]
    held, masked = (
        Importance(action=action, low=0.0)(log_weight, sample, log_weight) * f for action in ("truncate", "mask")
    )
    bias = [float(((mu * value).sum() - truth).abs()) for value in (held, masked)]
    spread = [float((mu * value.square()).sum() - (mu * value).sum() ** 2) for value in (held, masked)]
    assert bias[0] < bias[1] and spread[0] > spread[1]  # a mask loses the token whole: more bias, less variance


# two samples: ratios 0.2 0.9 4.0 (product 0.72, geometric mean 0.896) and 1.5 1.5 (2.25, 1.5)
RATIOS, SAMPLE = tensor(0.2, 0.9, 4.0, 1.5, 1.5), torch.tensor([0, 0, 0, 1, 1])
G = 0.72 ** (1 / 3)
CASES = [
    (Importance(), [0.2, 0.9, 2, 1.5, 1.5]),
    (Importance(action="clip"), [0.5, 0.9, 2, 1.5, 1.5]),
    (Importance(action="mask"), [0, 0.9, 0, 1.5, 1.5]),
    (Importance(action="mask", high=5.0), [0, 0.9, 4, 1.5, 1.5]),  # IcePop
    (Importance("sequence"), [0.72, 0.72, 0.72, 2, 2]),
    (Importance("sequence", "mask"), [0.72, 0.72, 0.72, 0, 0]),
    (Importance("geometric", "clip", high=1.2), [G, G, G, 1.2, 1.2]),
    (Importance("geometric", "mask", low=0.9, high=1.6), [0, 0, 0, 1.5, 1.5]),
    (Importance(reject="token", reject_low=0.5, reject_high=3.0), [0, 0.9, 0, 1.5, 1.5]),
    (Importance(reject="sequence"), [0.2, 0.9, 2, 0, 0]),
    (Importance(reject="geometric", reject_low=0.99, reject_high=1.6), [0, 0, 0, 1.5, 1.5]),
    (Importance(veto=0.25), [0, 0, 0, 1.5, 1.5]),
    (Importance(veto=1e-4), [0.2, 0.9, 2, 1.5, 1.5]),
    (Importance(normalize="token"), [w / 1.22 for w in (0.2, 0.9, 2, 1.5, 1.5)]),  # 6.1 / 5
    (Importance(normalize="sequence"), [w / ((3.1 / 3 + 1.5) / 2) for w in (0.2, 0.9, 2, 1.5, 1.5)]),
    (Importance(veto=0.25, normalize="token"), [0, 0, 0, 2.5, 2.5]),  # the vetoed count in the mean, with weight 0
    (NoCorrection(), [1] * 5),
]


@pytest.mark.parametrize("rule,wanted", CASES, ids=[str(rule)[:70] for rule, _ in CASES])
def test_the_table_of_weights(rule, wanted):
    weight = rule(RATIOS.log().requires_grad_(), SAMPLE, torch.ones(5, dtype=F64))
    assert near(weight, wanted) and not weight.requires_grad


def test_off_policy_masking_drops_bad_samples_that_the_policy_has_left():
    gap = tensor(-0.8, -0.6, -0.8, -0.6, 0.7, 0.7, -0.1, -0.1)  # log proximal - log behavior
    sample, a = torch.arange(4).repeat_interleave(2), tensor(-1, -1, 1, 1, -1, -1, -1, -1)
    assert OffPolicyMask(0.5)(gap, sample, a).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert OffPolicyMask(0.05)(gap, sample, a).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


logs = st.lists(st.tuples(st.floats(-30, 30, width=32), st.integers(0, 3)), max_size=14)
rules = st.builds(
    Importance,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    action=st.sampled_from(["truncate", "clip", "mask"]),
    low=st.floats(0, 1),
    high=st.floats(1, 9),
    reject=st.sampled_from(["none", "token", "sequence", "geometric"]),
    veto=st.sampled_from([0.0, 1e-4, 0.5]),
)


def given_logs(samples):
    return torch.tensor([x for x, _ in samples], dtype=F64), torch.tensor([s for _, s in samples], dtype=torch.int64)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(samples=logs, rule=rules, data=st.data())
def test_weights_are_bounded_and_move_with_their_tokens(samples, rule, data):
    gap, sample = given_logs(samples)
    weight = rule(gap, sample, torch.ones_like(gap))
    assert weight.shape == gap.shape and bool((weight >= 0).all()) and bool((weight <= rule.high).all())
    held = weight[weight > 0]
    assert rule.action == "truncate" or bool((held >= min(rule.low, 1.0)).all())
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))), dtype=torch.int64)
    assert torch.allclose(rule(gap[order], sample[order] * 31 - 7, torch.ones_like(gap)), weight[order])


@settings(max_examples=50, deadline=None)
@given(samples=logs, high=st.floats(1, 9), level=st.sampled_from(["token", "sequence", "geometric"]))
def test_truncation_never_raises_a_weight_and_no_cap_at_all_changes_nothing(samples, high, level):
    gap, sample = given_logs(samples)
    free = Importance(level, high=1e30)(gap, sample, gap)
    assert bool((Importance(level, high=high)(gap, sample, gap) <= free).all())
    assert torch.equal(Importance(level, high=1e30)(torch.zeros_like(gap), sample, gap), torch.ones_like(gap))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(samples=logs, rule=rules, how=st.sampled_from(["token", "sequence"]))
def test_normalised_weights_have_a_mean_of_one_unless_all_are_zero(samples, rule, how):
    from dataclasses import replace

    gap, sample = given_logs(samples)
    weight = replace(rule, normalize=how)(gap, sample, torch.ones_like(gap))
    if weight.any():
        means = [weight[sample == s].mean() for s in sample.unique()]
        assert float(weight.mean() if how == "token" else torch.stack(means).mean()) == pytest.approx(1)
    else:
        assert not rule(gap, sample, torch.ones_like(gap)).any()


def test_on_policy_every_importance_weight_is_one():
    flat, sample = torch.zeros(4, dtype=F64), torch.tensor([0, 0, 1, 2])
    for rule, _ in CASES:
        assert rule(flat, sample, -flat - 1).tolist() == [1.0] * 4


def brute_force(weights):
    """The bound of least error, tried one after the other in plain Python; of equal ones the smallest."""
    n, mean = len(weights), sum(weights) / len(weights)

    def error(bound):
        held = [min(w, bound) for w in weights]
        middle = sum(held) / n
        return (mean - middle) ** 2 + sum((w - middle) ** 2 for w in held) / n / n

    return min(sorted({1.0, *(w for w in weights if w > 1)}), key=error), error


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(samples=logs.filter(bool), level=st.sampled_from(["token", "sequence", "geometric"]))
@example(samples=[(17.75, 0)] * 3, level="token")  # a difference of squares is 0.17 off
def test_the_chosen_bound_has_the_least_error_of_all(samples, level):
    gap, sample = given_logs(samples)
    free = Importance(level, high=1e30)(gap, sample, gap)
    each = free if level == "token" else torch.stack([free[sample == s][0] for s in sample.unique()])
    wanted, error = brute_force(each.tolist())
    rule = Importance(level, high="auto")
    found = rule.bound(gap, sample)
    assert error(found.high) == pytest.approx(error(wanted), rel=1e-6, abs=1e-12)
    assert found.bias_squared + found.variance == pytest.approx(error(found.high), rel=1e-6, abs=1e-12)
    assert torch.equal(rule(gap, sample, gap), free.clamp(max=found.high))
    assert rule.measures(gap, sample)["train/correction_high"] == found.high


def test_the_more_tokens_the_higher_the_bound():
    """Variance falls with their number and bias does not: weights of the same distribution are cut later."""
    drawn = torch.randn(100_000, dtype=F64, generator=torch.Generator().manual_seed(0))
    bounds = [
        Importance(high="auto").bound(drawn[:n], torch.zeros(n, dtype=torch.int64)).high for n in (100, 3_000, 100_000)
    ]
    assert 1 < bounds[0] < bounds[1] < bounds[2]
    still = torch.zeros(9, dtype=F64)
    assert Importance(high="auto").bound(still, still.long()) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [({"high": "auto", "action": "mask"}, "beside action = 'mask'"), ({"high": "best"}, "'auto'|auto")],
)
def test_bounds_that_cannot_be_chosen_are_refused(knobs, said):
    with pytest.raises(ConfigError, match=said):
        Importance(**knobs)
