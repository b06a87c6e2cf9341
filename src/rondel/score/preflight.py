"""Is the reward right? Asked before the hour is spent: gold answers must pass, empty and wrong ones must not."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score import reward_urls
from rondel.score.number import last_number
from rondel.score.pool import RewardPool

GROUPS = 6  # that a check rolls out to measure the signal
# "gold", "empty", "wrong" -> what was answered, and what it was worth
Scores = dict[str, list[tuple[Task, str, Score]]]
PAID = 2  # tasks that are tried where every call goes to a server


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """`CheckFinding("gold", False, "a gold answer scored 0.0 ...", "compare ...")`. `remedy` is empty where all is well."""

    what: str
    ok: bool
    message: str
    remedy: str = ""


def gold_answer(task: Task) -> str:
    """The gold answer as the policy would write it."""
    return str(task.data["answer"])


async def check_reward(
    pool: RewardPool, tasks: Sequence[Task], *, count: int = 8, gold: Callable[[Task], str] = gold_answer
) -> list[CheckFinding]:
    """Findings on the first `count` tasks with an answer: failures, gold, empty, wrong, time.

    A reward that also wants a form (tags, a box) needs `gold` to write the answer in that form.
    """
    asked = reward_urls(pool.reward)
    tried = [task for task in tasks if task.data.get("answer") is not None][: min(count, PAID) if asked else count]
    if not tried:
        return [
            CheckFinding(
                "gold",
                False,
                "no task has an 'answer', so the reward was not tried",
                "name the column with answer = '...'",
            )
        ]
    texts = (
        [("gold", t, gold(t)) for t in tried]
        + [("empty", t, "") for t in tried]
        + [("wrong", t, _pick_wrong_answer(t, tried, gold)) for t in tried]
    )
    scores: Scores = {"gold": [], "empty": [], "wrong": []}
    failures: list[tuple[str, Task, Failed]] = []
    seconds: list[float] = []
    results: dict[tuple[str, str], Score | Failed] = {}
    if pool.groupwise:  # the three answers to a task are its group
        for task in tried:
            own = [(kind, text) for kind, of, text in texts if of is task]
            start = time.perf_counter()
            given = await pool.score_group([Trajectory(text=text) for _, text in own], task)
            seconds.append(time.perf_counter() - start)
            results |= {(kind, task.id): result for (kind, _), result in zip(own, given)}
    for kind, task, text in texts:
        if not pool.groupwise:
            start = time.perf_counter()
            results[kind, task.id] = await pool.score(Trajectory(text=text), task)
            seconds.append(time.perf_counter() - start)
        result = results[kind, task.id]
        if isinstance(result, Failed):
            failures.append((kind, task, result))
        else:
            scores[kind].append((task, text, result))
    calls = [CheckFinding("calls", True, f"{len(texts)} were made to {', '.join(asked)}")] if asked else []
    return [*calls, *judge_scores(scores, failures, len(texts)), _check_time(seconds, pool)]


def judge_scores(scores: Scores, failures: Sequence[tuple[str, Task, Failed]], calls: int) -> list[CheckFinding]:
    """What the scores of gold, empty and wrong answers say of whoever gave them."""
    return [
        _check_failures(failures, calls),
        *_check_gold(scores),
        *(_check_below_gold(kind, scores) for kind in ("empty", "wrong")),
    ]


def _check_failures(failures: Sequence[tuple[str, Task, Failed]], calls: int) -> CheckFinding:
    if not failures:
        return CheckFinding("failures", True, f"the reward answered all {calls} calls")
    kind, task, failed = failures[0]
    first = f"first on the {kind} answer of {task.id}: {failed.reason} {failed.detail}".strip()
    return CheckFinding(
        "failures",
        False,
        f"the reward failed in {len(failures)} of {calls} calls; {first}",
        "make the reward return a number for every text; raise only when it cannot judge",
    )


def _check_gold(scores: Scores) -> list[CheckFinding]:
    if not scores["gold"]:
        return [CheckFinding("gold", False, "no gold answer got a score", "see the failures above")]
    best = max(score.value for results in scores.values() for *_, score in results)
    low = [(task, text, score) for task, text, score in scores["gold"] if score.value < best]
    if not low:
        return [CheckFinding("gold", True, f"all {len(scores['gold'])} gold answers score the maximum seen, {best:g}")]
    task, text, score = low[0]
    message = f"{len(low)} of {len(scores['gold'])} gold answers score less than {best:g}; {task.id}: {text!r:.60} scores {score.value:g}"
    return [CheckFinding("gold", False, message, "compare what the reward extracts with the form of the gold answers")]


def _check_below_gold(kind: str, scores: Scores) -> CheckFinding:
    gold = {task.id: score.value for task, _, score in scores["gold"]}
    bad = [
        (task, text, score) for task, text, score in scores[kind] if task.id in gold and score.value >= gold[task.id]
    ]
    if not bad:
        return CheckFinding(kind, True, f"{kind} answers score less than gold ones")
    task, text, score = bad[0]
    message = (
        f"{len(bad)} {kind} answers score as much as gold ones; {task.id}: {text!r:.60} scores {score.value:g}, gold "
        f"{gold[task.id]:g}"
    )
    return CheckFinding(
        kind,
        False,
        message,
        "a reward that does not tell right from wrong gives nothing to learn; look at what it extracts",
    )


def _check_time(seconds: list[float], pool: RewardPool) -> CheckFinding:
    message = f"{statistics.median(seconds) * 1e3:.1f} ms a call, 95 % within {p95(seconds) * 1e3:.1f} ms, slowest {max(seconds) * 1e3:.1f} ms; the limit is {pool.timeout:g} s"
    slow = max(seconds) > pool.timeout / 2
    return CheckFinding("time", not slow, message, "raise the reward's timeout, or make it faster" if slow else "")


def p95(seconds: Sequence[float]) -> float:
    """The time within which 95 % of the calls ended."""
    return sorted(seconds)[max(0, math.ceil(0.95 * len(seconds)) - 1)]


def _pick_wrong_answer(task: Task, tasks: Sequence[Task], gold: Callable[[Task], str]) -> str:
    """Another task's gold answer, as good-looking as a wrong answer gets; else the number after the right one."""
    right = gold(task)
    number = last_number(right)
    for other in tasks:
        if gold(other) != right and (number is None or last_number(gold(other)) != number):
            return gold(other)
    return "I do not know" if number is None else str(number + Fraction(1))
