"""Estimates from n draws a task: pass@k, majority@k, and the bootstrap interval of a mean over tasks.

A task has n draws, c of which are right. pass@k and majority@k are expectations over the subsets of k of its n draws,
so k ≤ n, and no draw is thrown away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

RESAMPLES = 2000
CHUNK = 1 << 20  # numbers that are drawn at once


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that a subset of k of n draws has one of the c right
    ones.  Chen et al., arXiv:2107.03374, eq. 1: unbiased, which 1 - (1 - c/n)^k is not.

    `pass_at_k(4, 1, 2)` is 0.5.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} draws, {c} right: 0 <= c <= n and 1 <= k <= n must hold")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[Hashable | None], right: Sequence[float], k: int) -> float:
    """Expected correctness of the answer that most of k draws give, over all subsets of k of the n draws; exact.

    votes  [n] the answer of each draw, None where it has none: such a draw votes for nothing
    right  [n] how right each draw is, in [0, 1]; an answer is as right as its draws are on average

    Answers with equally many votes share the win. A subset in which no draw has an answer is wrong.
    For an answer with c votes the sum runs over its votes m in the subset and over the number of others that
    have m, too: (x^votes, y^ties) of the product over the others of Σ_{j<m} C(c', j) x^j + C(c', m) x^m y.
    """
    n = len(votes)
    if len(right) != n or not 1 <= k <= n:
        raise ValueError(f"majority@{k} of {n} votes with {len(right)} verdicts: 1 <= k <= n must hold")
    counts = Counter(vote for vote in votes if vote is not None)
    silent = n - sum(counts.values())
    share_of = {c: _win_share(c, [*counts.values()], silent, k) for c in set(counts.values())}
    worth = {
        answer: math.fsum(r for vote, r in zip(votes, right) if vote == answer) / c for answer, c in counts.items()
    }
    return math.fsum(worth[answer] * share_of[c] for answer, c in counts.items()) / math.comb(n, k)


def _win_share(own: int, counts: list[int], silent: int, k: int) -> float:
    """Subsets of k in which an answer with `own` votes wins, each counted by its share among those that tie."""
    others = list(counts)
    others.remove(own)
    total = 0.0
    for m in range(1, min(own, k) + 1):
        ways = {(0, 0): math.comb(own, m)}  # (votes of others, answers that tie) -> subsets
        for c in others:
            ways = _add_answer(ways, c, m, k - m)
        for (used, ties), count in ways.items():
            total += count * math.comb(silent, k - m - used) / (1 + ties)
    return total


def _add_answer(ways: dict[tuple[int, int], int], c: int, m: int, room: int) -> dict[tuple[int, int], int]:
    """One more answer with c votes, of which at most m are in the subset."""
    grown: dict[tuple[int, int], int] = {}
    for (used, ties), count in ways.items():
        for j in range(min(c, m, room - used) + 1):
            key = (used + j, ties + (j == m))
            grown[key] = grown.get(key, 0) + count * math.comb(c, j)
    return grown


def bootstrap_interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean of one value a task, tasks drawn again with replacement.  Efron 1979,
    doi:10.1214/aos/1176344552.  Tasks and not draws are what the next test set has anew.

    Equal values have no spread to draw from: (value, value). No values: (0, 1).
    """
    if not len(values):
        return 0.0, 1.0
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.min() == numbers.max():
        return float(numbers[0]), float(numbers[0])
    rng, rows = np.random.default_rng(seed), max(1, CHUNK // len(numbers))
    means = np.concatenate(
        [
            numbers[rng.integers(0, len(numbers), (min(rows, RESAMPLES - at), len(numbers)))].mean(axis=1)
            for at in range(0, RESAMPLES, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
