"""pass@k and majority@k against counting every subset, and intervals against closed forms and coverage."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from rondel.core.config.task import EvaluationConfig
from rondel.driver.evaluation import BOOTSTRAP, draw_metrics, score_interval
from rondel.runtime.telemetry.card import wilson_interval
from rondel.runtime.telemetry.draw_estimates import bootstrap_interval, majority_at_k, pass_at_k
from rondel.score.vote import vote_of


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_draw(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, 0, n + 1)


def counted_majority(votes, right, k):
    """By every subset: the answers with most votes share it."""
    worth = {a: sum(r for v, r in zip(votes, right) if v == a) / votes.count(a) for a in set(votes)}
    total = []
    for subset in combinations(votes, k):
        counts = Counter(v for v in subset if v is not None)
        most = max(counts.values(), default=0)
        winners = [a for a, m in counts.items() if m == most]
        total.append(sum(worth[a] for a in winners) / len(winners) if winners else 0.0)
    return sum(total) / len(total)


def test_majority_at_k_is_that_of_every_subset():
    rng = random.Random(0)
    for _ in range(60):
        n = rng.randint(1, 9)
        votes = [rng.choice(["a", "b", "c", "d", None]) for _ in range(n)]
        truth = rng.choice("abcd")
        right = [float(v == truth) if v != "d" else rng.random() for v in votes]
        for k in range(1, n + 1):
            assert majority_at_k(votes, right, k) == pytest.approx(counted_majority(votes, right, k), abs=1e-12)
    assert majority_at_k(["7", "7", "8", "9"], [1, 1, 0, 0], 4) == 1.0
    assert (
        majority_at_k([f"{i % 40}" for i in range(64)], [float(i % 40 == 0) for i in range(64)], 32) < 1
    )  # in no time


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held, widths = 0, []
    for seed in range(60):
        values = rng.beta(2, 3, size=50)
        low, high = bootstrap_interval(values, seed)
        held, widths = held + (low <= 0.4 <= high), [*widths, high - low]
    assert held >= 51  # of 60: 57 expected
    assert np.mean(widths) == pytest.approx(2 * 1.96 * math.sqrt(0.04 / 50), rel=0.08)  # beta(2, 3) has variance 0.04
    assert bootstrap_interval([0.3, 0.3]) == (0.3, 0.3) and bootstrap_interval([]) == (0.0, 1.0)


def test_which_interval_is_taken():
    assert score_interval([0.0, 1.0, 1.0], [0, 1, 1], 1) == (*wilson_interval(2, 3), "Wilson")
    assert score_interval([0.5, 1.0], [0, 1, 1, 1], 2)[2] == BOOTSTRAP
    assert score_interval([1.0] * 5, [1] * 10, 2) == (*wilson_interval(5, 5), "Wilson")  # no spread is no certainty
    assert score_interval([0.5, 3.0], [0.5, 3.0], 1)[2] == "normal"


def test_what_could_not_be_scored_is_never_right():
    """Also where rewards are -1 or 0, so that 0 would pass; in the mean it counts as the worst of them."""
    given = EvaluationConfig(samples=2, k=[1], pass_reward=0.0)
    found = draw_metrics([[None, 0.0], [None, -1.0]], [["1", "2"], ["3", "4"]], given)
    assert found["avg@2"][0] == -0.75 and found["pass@1"][0] == found["majority@1"][0] == 0.25


def test_metrics_of_draws():
    given = EvaluationConfig(samples=4, k=[1, 2], pass_reward=0.5)
    rewards, votes = [[1.0, 0.5, 0.0, 0.0], [0.0] * 4], [["7", "so 7.0", "8", "9"], ["1", "2", "3", ""]]
    told = draw_metrics(rewards, votes, given)
    assert list(told) == ["avg@4", "pass@1", "pass@2", "majority@1", "majority@2"]
    assert told["avg@4"][0] == pytest.approx(1.5 / 8) and told["pass@1"][0] == pytest.approx(0.25)
    assert told["pass@2"][0] == pytest.approx((1 - 1 / 6) / 2)
    assert told["majority@1"] == pytest.approx(told["pass@1"])
    assert all(low <= value <= high for value, low, high in told.values())
    assert "majority@1" not in draw_metrics(rewards, [[""] * 4] * 2, given)
    assert draw_metrics([[1.0]], [["7"]], EvaluationConfig()) == {}
    assert EvaluationConfig(samples=6).reported_k == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"samples": 4, "k": [8]}, "raise samples"),
        ({"samples": 4, "sampling": {"temperature": 0}}, "set a temperature"),
        ({"sets": {"held_out": {"kind": "digits"}}}, "cannot be called 'held_out'"),
        ({"sets": {"a/b": {"kind": "digits"}}}, "cannot be called 'a/b'"),
    ],
)
def test_what_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        EvaluationConfig(**settings)


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        (r"so \boxed{1,000}", "1000"), ("it is 1000.0", "1000"), (r"\boxed{ X + Y }", "x + y"),
        ("<answer>Blue  sky</answer>", "blue sky"), ("not 7 but 8", "8"), ("yes", "yes"), ("", None), ("word " * 100, None),
        (r"\boxed{x_1}", "x_1"),
    ],
)  # fmt: skip
def test_votes(text, vote):
    assert vote_of(text) == vote
