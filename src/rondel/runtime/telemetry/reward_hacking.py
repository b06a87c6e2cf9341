"""Is the reward earned, or got? A reward that rises beside something it should not pay
for is said aloud, once for each time.

Three things of a step are looked at, each a mean over SPAN steps against the SPAN steps before: the length of answers,
what they repeat, and the parts of the reward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from rondel.algos.tokens import repeated_fraction
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.events import Warned, emit
from rondel.core.types import ATTEMPTS, SOLVED, Group, Score, Trajectory

SPAN = 8  # steps on each side of a comparison
SIGMAS = 3.0  # standard errors by which the reward must have risen
LONGER = 1.1  # answers that have grown by so much are longer
PAID = 0.4  # a correlation of reward and length within groups above which length is paid
REPEATS = 0.1  # by which the share of repeated n-grams must have grown
NGRAM, TAIL = 8, 2000  # tokens in an n-gram; the end of an answer that is looked at


def from_scored(groups: Iterable[Group]) -> dict[str, float]:
    """What the trained groups of one step say beyond their rewards."""
    groups = list(groups)
    scored = [[t for t in group.policy_samples if isinstance(t.score, Score)] for group in groups]
    row: dict[str, float] = {}
    # of an episode of actions length is often the goal
    if (
        found := length_correlation([[t for t in g if not (t.steps and t.steps.observed)] for g in scored])
    ) is not None:
        row["score/length_correlation"] = found
    firsts = [trajectories[0] for trajectories in scored if trajectories]
    texts = [t for t in firsts if t.steps is None]  # actions and points may well repeat themselves
    if shares := [share for t in texts if (share := tail_repetition(t.tokens, t.mask)) is not None]:
        row["generate/repetition"] = math.fsum(shares) / len(shares)
    if spreads := [spread for group in groups if (spread := spread_of_points(group)) is not None]:
        row["generate/spread"] = math.fsum(spreads) / len(spreads)
    parts: dict[str, list[float]] = {}
    for trajectory in (t for trajectories in scored for t in trajectories):
        assert isinstance(trajectory.score, Score)
        for name, value in trajectory.score.parts.items():
            parts.setdefault(name, []).append(value)
    return row | {f"score/part_{name}": math.fsum(values) / len(values) for name, values in parts.items()}


def spread_of_points(group: Group) -> float | None:
    """How far apart the points lie that a group drew: the root of their mean squared distance from their mean; None
    where it drew tokens or actions, or one point.
    """
    found = [t.steps for t in group.policy_samples if isinstance(t.steps, ContinuousSteps)]
    points = [steps.drawn[-1] for steps in found if not steps.observed]
    if len(points) < 2:
        return None
    mean = sum(points) / len(points)
    return math.sqrt(sum(float(((p - mean) ** 2).sum()) for p in points) / len(points))


def length_correlation(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    """Σ (r - r̄)(l - l̄) / √(Σ (r - r̄)² · Σ (l - l̄)²) of rewards r and lengths l, means within each group; None where
    one of both is constant.
    """
    both = rewards = lengths = 0.0
    for group in groups:
        if not group:
            continue
        r, n = [t.reward or 0.0 for t in group], [float(t.written) for t in group]
        r_mean, n_mean = math.fsum(r) / len(r), math.fsum(n) / len(n)
        both += math.fsum((x - r_mean) * (y - n_mean) for x, y in zip(r, n))
        rewards += math.fsum((x - r_mean) ** 2 for x in r)
        lengths += math.fsum((y - n_mean) ** 2 for y in n)
    return both / math.sqrt(rewards * lengths) if rewards > 0 and lengths > 0 else None


def tail_repetition(tokens: Sequence[int], mask: Sequence[Any]) -> float | None:
    """Of the end of an answer; None where it is shorter than one n-gram."""
    return repeated_fraction(tokens[-TAIL:], mask[-TAIL:], NGRAM)


class HackingMonitor:
    """A writer of rows: `StepMetrics(..., HackingMonitor().write)`. Of a run that goes back to a checkpoint, what it repeats
    counts once.
    """

    def __init__(self) -> None:
        self.rows: deque[dict[str, float]] = deque(maxlen=2 * SPAN)
        self.steps: deque[int] = deque(maxlen=2 * SPAN)  # of these rows
        self.quiet: dict[str, int] = {}  # steps since an alarm was last true; not in it are those that never were

    def write(self, step: int, row: dict[str, float]) -> None:
        for told in self.check_step(step, row):
            emit(Warned(told))

    def check_step(self, step: int, row: dict[str, float]) -> list[str]:
        """What to tell the user of this step, mostly nothing."""
        if "score/reward_mean" not in row:  # an evaluation, or a step of the warmup
            return []
        while self.steps and self.steps[-1] >= step:
            self.steps.pop(), self.rows.pop()
        self.steps.append(step)
        self.rows.append(row)
        if len(self.rows) < 2 * SPAN:
            return []
        told = []
        rise = self._significant_rise("score/reward_mean")
        findings = (
            {"length": self._check_length, "repetition": self._repetition_evidence, "parts": self._check_parts}
            if rise
            else {}
        )
        for name in ("length", "repetition", "parts"):
            text = findings[name]() if name in findings else ""
            # once for each time: a step of noise does not end it
            if rise and text and self.quiet.get(name, SPAN) >= SPAN:
                told.append(f"the reward rose from {rise[0]:.3g} to {rise[1]:.3g} within {2 * SPAN} steps, and {text}")
            self.quiet[name] = 0 if text else self.quiet.get(name, SPAN) + 1
        return told

    def _check_length(self) -> str:
        before, now = self._half_means("generate/length_mean")
        _, paid = self._half_means("score/length_correlation")
        if not (now > LONGER * before and paid > PAID):
            return ""
        return (
            f"answers grew from {before:.0f} to {now:.0f} tokens; within groups reward and length correlate at "
            f"{paid:.2f}: the reward may pay for "
            "length. Look at the longest with `rondel view`, and at a part of the reward against length"
        )

    def _repetition_evidence(self) -> str:
        before, now = self._half_means("generate/repetition")
        if not now - before > REPEATS:
            return ""
        return (
            f"answers repeat themselves: {now:.0%} of their {NGRAM}-grams were there before, {before:.0%} earlier. A "
            f"loop earns what a thought should: "
            "see task.filters = ['repetition']"
        )

    def _check_parts(self) -> str:
        """The first part is what matters, or the one that is called correct; the others are form."""
        counts = {f"score/part_{name}" for name in (ATTEMPTS, SOLVED)}
        names = [name for name in self.rows[-1] if name.startswith("score/part_") and name not in counts]
        main = next((n for n in names if n == "score/part_correct"), names[0] if names else "")
        if len(names) < 2 or self._significant_rise(main):
            return ""
        risen = [name for name in names if name != main and self._significant_rise(name)]
        if not risen:
            return ""
        told = ", ".join(
            "{} ({:.3g} to {:.3g})".format(n.removeprefix("score/part_"), *self._half_means(n)) for n in risen
        )
        before, now = self._half_means(main)
        return (
            f"only by its part {told}; '{main.removeprefix('score/part_')}' stayed at {now:.3g} ({before:.3g} before): "
            f"form is learned and not what it is "
            "for. Give the form less weight"
        )

    def _half_means(self, name: str) -> tuple[float, float]:
        rows = list(self.rows)
        halves = [[row[name] for row in half if name in row] for half in (rows[:SPAN], rows[SPAN:])]
        before, now = (math.fsum(half) / len(half) if half else math.nan for half in halves)
        return before, now

    def _significant_rise(self, name: str) -> tuple[float, float] | None:
        """(before, now) where the difference is SIGMAS standard errors above 0."""
        before, now = self._half_means(name)
        rows = list(self.rows)
        spread = [
            sum((row.get(name, m) - m) ** 2 for row in half) for half, m in ((rows[:SPAN], before), (rows[SPAN:], now))
        ]
        error = math.sqrt(sum(spread) / (2 * SPAN - 2) * 2 / SPAN)
        return (before, now) if now - before > max(SIGMAS * error, 1e-9) else None
