"""Is the reward right? Asked before the hour is spent: gold answers must pass, empty and wrong ones must not."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score import reward_urls
from rondel.score.number import last_number
from rondel.score.pool import RewardPool
from rondel.score.result import check_score

GROUPS = 6  # that a check rolls out to measure the signal
# "gold", "empty", "wrong" -> what was answered, and what it was worth
Scores = dict[str, list[tuple[Task, str, Score]]]
TRIED, PAID = 8, 2  # tasks that are tried; those where every call goes to a server
# ("gold" | "empty" | "wrong", task) -> what came of it, with a score where somebody gave it one already
Attempt = Callable[[str, Task], Awaitable[Trajectory | Failed]]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """`CheckFinding("gold", False, "a gold answer scored 0.0 ...", "compare ...")`.
    `remedy` is empty where all is well.

    A `warning` is ok, and still worth its remedy.
    """

    what: str
    ok: bool
    message: str
    remedy: str = ""
    warning: bool = False


def gold_answer(task: Task) -> str:
    """The gold answer as the policy would write it."""
    return str(task.data["answer"])


def count_tried(pool: RewardPool | None) -> int:
    """How many tasks are tried: fewer where a call has a price."""
    return PAID if pool is not None and reward_urls(pool.reward) else TRIED


async def check_reward(
    pool: RewardPool, tasks: Sequence[Task], *, gold: Callable[[Task], str] = gold_answer
) -> list[CheckFinding]:
    """Findings on the first tasks with an answer, each answered in one text: failures, gold, empty, wrong, time.
    Where no task has one, a single finding: whether the reward can do without.

    A reward that also wants a form (tags, a box) needs `gold` to write the answer in that form.
    """
    tried = [task for task in tasks if task.data.get("answer") is not None][: count_tried(pool)]
    if not tried:
        return [await _check_without_gold(pool, tasks[: count_tried(pool)])]
    texts = {"gold": gold, "empty": lambda task: "", "wrong": lambda task: _pick_wrong_answer(task, tried, gold)}

    async def write_text(kind: str, task: Task) -> Trajectory:
        return Trajectory(text=texts[kind](task))

    return await check_attempts(pool, tried, write_text)


async def _check_without_gold(pool: RewardPool, tasks: Sequence[Task]) -> CheckFinding:
    """What the reward says of an empty answer to each task: one that needs gold fails."""
    scores = [(await pool.score_group([Trajectory(text="")], task))[0] for task in tasks]
    failed = [score for score in scores if isinstance(score, Failed)]
    told = "no task has an 'answer', so gold and wrong ones were not tried"
    if not failed:
        return CheckFinding("gold", True, f"{told}; the reward answered all {len(scores)} calls with an empty one")
    return CheckFinding(
        "gold",
        False,
        f"{told}, and with an empty one the reward failed in {len(failed)} of {len(scores)} calls; first: "
        f"{failed[0].reason} {failed[0].detail}".strip(),
        "name the column with answer = '...', or mend the reward: it must return a number for every text",
    )


async def check_attempts(
    pool: RewardPool | None, tasks: Sequence[Task], attempt: Attempt, *, maximum: float | None = None
) -> list[CheckFinding]:
    """Findings on a gold, an empty and a wrong attempt at each task. The pool scores those without a score; `maximum` is
    the most that the others can have, where that is known."""
    scores: Scores = {"gold": [], "empty": [], "wrong": []}
    failures: list[tuple[str, Task, Failed]] = []
    seconds: list[float] = []
    for task in tasks:
        made = {kind: await attempt(kind, task) for kind in scores}
        waiting = [one for one in made.values() if isinstance(one, Trajectory) and one.score is None]
        if pool is not None and waiting:
            for asked in [waiting] if pool.groupwise else [[one] for one in waiting]:
                start = time.perf_counter()
                given = await pool.score_group(asked, task)
                seconds.append(time.perf_counter() - start)
                for trajectory, score in zip(asked, given, strict=True):
                    trajectory.score = score
        for kind, one in made.items():
            if isinstance(one, Failed):
                failures.append((kind, task, one))
            elif isinstance(score := check_score(one.score, one), Failed):  # type: ignore[arg-type]
                failures.append((kind, task, score))
            else:
                scores[kind].append((task, one.text, score))
    asked_urls = reward_urls(pool.reward) if pool is not None and seconds else []
    calls = (
        [CheckFinding("calls", True, f"{3 * len(tasks)} were made to {', '.join(asked_urls)}")] if asked_urls else []
    )
    highest = pool.maximum if pool is not None and seconds else maximum
    found = [*calls, *judge_scores(scores, failures, 3 * len(tasks), highest)]
    return [*found, _check_time(seconds, pool)] if pool is not None and seconds else found


def judge_scores(
    scores: Scores, failures: Sequence[tuple[str, Task, Failed]], calls: int, maximum: float | None = None
) -> list[CheckFinding]:
    """What the scores of gold, empty and wrong answers say of whoever gave them. `maximum`: the most that it gives,
    where that is known."""
    return [
        _check_failures(failures, calls),
        _check_gold(scores, maximum),
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


def _check_gold(scores: Scores, maximum: float | None) -> CheckFinding:
    """Whether gold reaches the maximum; the largest score of all where nobody says what that is."""
    if not scores["gold"]:
        return CheckFinding("gold", False, "no gold answer got a score", "see the failures above")
    seen = max(score.value for results in scores.values() for *_, score in results)
    best = seen if maximum is None else maximum
    low = [(task, text, score) for task, text, score in scores["gold"] if score.value < best - 1e-9]
    whose = "maximum seen" if maximum is None else "reward's maximum"
    if not low:
        return CheckFinding("gold", True, f"all {len(scores['gold'])} gold answers score the {whose}, {best:g}")
    task, text, score = low[0]
    return CheckFinding(
        "gold",
        maximum is not None,
        f"{len(low)} of {len(scores['gold'])} gold answers score less than the {whose}, {best:g}; {task.id}: "
        f"{text!r:.60} scores {score.value:g}",
        "compare what the reward extracts with the form of the gold answers",
        warning=maximum is not None,
    )


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
    message = (
        f"{statistics.median(seconds) * 1e3:.1f} ms a call, 95 % within {p95(seconds) * 1e3:.1f} ms, slowest "
        f"{max(seconds) * 1e3:.1f} ms; the limit is {pool.timeout:g} s"
    )
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
