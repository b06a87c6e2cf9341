"""Rewards that are got and not earned: each alarm has a run that shows it, and its like that does not."""

import json
import random

import numpy as np
import pytest

from kits.runs import run as run_job
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.events import Warned, subscribe
from rondel.core.types import Failed, Group, Score, Task, Trajectory
from rondel.dashboard.columns import MetricRow
from rondel.dashboard.run import DashboardRun
from rondel.runtime.telemetry.diagnose.story import read_story
from rondel.runtime.telemetry.metrics import metric_meaning
from rondel.runtime.telemetry.reward_hacking import SPAN, HackingMonitor, from_scored

OF_ANSWERS = ("score/length_correlation", "score/part_", "generate/repetition")


def warned(rows):
    heard, hacking = [], HackingMonitor()
    end = subscribe(lambda event: heard.append(event.message) if isinstance(event, Warned) else None)
    try:
        for step, row in enumerate(rows):
            hacking.write(step, row)
    finally:
        end()
    return heard


def run(steps=40, *, reward=0.01, length=0.0, paid=0.0, repeats=0.0, correct=0.0, form=0.0, seed=0):
    """Rows of a run: each argument is the rise of a step, `paid` the correlation of reward and length."""
    noise = random.Random(seed)

    def about(value):
        return value + noise.gauss(0, 0.005)

    return [
        {
            "score/reward_mean": about(0.2 + reward * i),
            "generate/length_mean": 100 + length * i + noise.gauss(0, 1),
            "score/length_correlation": about(paid),
            "generate/repetition": max(0.0, about(0.05 + repeats * i)),
            "score/part_correct": about(0.2 + correct * i),
            "score/part_form": about(0.1 + form * i),
        }
        for i in range(steps)
    ]


HEALTHY = {"correct": 0.01, "form": 0.0}
SHOWN = {
    "length": ({**HEALTHY, "length": 5, "paid": 0.6}, "reward and length correlate at 0.6"),
    "repetition": ({**HEALTHY, "repeats": 0.02}, "repeat themselves"),
    "parts": ({"form": 0.01}, "only by its part form"),
}
QUIET = [
    {**HEALTHY},
    {**HEALTHY, "length": 5, "paid": 0.1},  # harder tasks, longer answers, and nobody is paid for it
    {**HEALTHY, "length": 0, "paid": 0.9},  # long answers are better, and do not grow
    {**HEALTHY, "repeats": 0.002},
    {"correct": 0.005, "form": 0.005},  # both are learned
    {"reward": 0.0, "length": 5, "paid": 0.6, "repeats": 0.02, "form": 0.01},  # nothing was got
    {"reward": -0.01, "length": 5, "paid": 0.6, "form": 0.01},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SHOWN)
def test_each_alarm_is_heard_once(name, seed):
    series, message = SHOWN[name]
    (heard,) = warned(run(**series, seed=seed))
    assert message in heard and heard.startswith("the reward rose from ")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("series", QUIET, ids=str)
def test_a_run_that_only_learns_is_left_alone(series, seed):
    assert warned(run(**series, seed=seed)) == []


def test_counts_of_a_visit_are_no_parts_of_a_reward():
    rows = run(**HEALTHY, seed=0)
    counted = [
        {k: v for k, v in row.items() if not k.startswith("score/part_")}
        | {"score/part_visit_attempts": 16.0, "score/part_visit_solved": 8 + 0.1 * i}
        for i, row in enumerate(rows)
    ]
    assert warned(counted) == []


def test_an_alarm_speaks_again_after_it_was_silent():
    calm = run(4 * SPAN, reward=0.0)
    bad = run(4 * SPAN, form=0.01)
    assert len(warned(bad + calm + bad)) >= 2 and len(warned(bad)) == 1


def test_steps_that_a_run_repeats_count_once():
    """A run that goes back to its checkpoint every few steps says what one without interruption says, and no sooner."""
    rows = run(2 * SPAN, form=0.01)
    once, again = HackingMonitor(), HackingMonitor()
    assert [once.check_step(step, row) for step, row in enumerate(rows)][-1], "the last row shows it"
    told = []
    for step, row in enumerate(rows[:-1]):
        told += again.check_step(step, row)
        if step % 5 == 4:
            for back in range(step - 3, step + 1):
                told += again.check_step(back, rows[back])
    assert told == [] and list(again.rows) == rows[:-1] and again.check_step(2 * SPAN - 1, rows[-1])


def test_too_few_steps_and_evaluations_say_nothing():
    assert warned(run(2 * SPAN - 1, form=0.01)) == [] and warned([{"eval/score": 0.1 * i} for i in range(40)]) == []


def answer(tokens, score):
    t = Trajectory(text="x")
    t.extend([1, 2])
    t.extend(tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens))
    t.score = score
    return t


def group(*answers):
    return Group(0, Task("t", "x", {}), list(answers), 0)


def test_the_numbers_of_a_step():
    longer_is_better = [
        group(*(answer(list(range(10 * n)), Score(float(n + easy))) for n in (1, 2, 3))) for easy in (0, 50)
    ]
    row = from_scored(longer_is_better)
    assert row["score/length_correlation"] == pytest.approx(1.0) and row["generate/repetition"] == 0.0
    # between groups nothing is compared: the easy task has longer answers and more reward
    between = [
        group(answer([1] * 10, Score(0.0)), answer([1] * 10, Score(1.0))),
        group(answer([1] * 90, Score(9.0)), answer([1] * 90, Score(8.0))),
    ]
    assert "score/length_correlation" not in from_scored(between)
    assert from_scored(between)["generate/repetition"] == pytest.approx(((1 - 1 / 3) + (1 - 1 / 83)) / 2)
    # a failure is in none of them
    parts = group(
        answer([1], Score(1.0, {"correct": 1.0, "form": 0.0})),
        answer([1] * 50, Failed("no")),
        answer([1, 2], Score(0.5, {"form": 0.5})),
    )
    assert from_scored([parts]) == {
        "score/length_correlation": pytest.approx(-1.0), "score/part_correct": 1.0, "score/part_form": 0.25
    }  # fmt: skip
    assert from_scored([]) == {} and from_scored([group(answer([1], Failed("no")))]) == {}


def test_the_length_of_an_episode_of_actions_is_no_length_of_an_answer():
    steps = ContinuousSteps(np.zeros((2, 5), np.float32), 4)
    played = [answer([0] * n, Score(float(n))) for n in (1, 2)]
    assert from_scored([group(*played)])["score/length_correlation"] == pytest.approx(1.0)
    for t in played:
        t.steps = steps
    assert from_scored([group(*played)]) == {}


def test_a_run_its_journal_and_its_dashboard_say_the_same(tmp_path):
    """Some answers cannot be scored, some groups are dropped, some wait for the step that trains them."""
    how = {"task__reward": "kits.rewards:parity_or_failure", "task__filters": ["signal"], "run__sinks": ["jsonl"]}
    run_job(tmp_path, loop__warmup__steps=1, loop__steps=4, loop__max_staleness=2, **how)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    live = {row["step"]: {k: v for k, v in row.items() if k.startswith(OF_ANSWERS)} for row in rows}
    assert any("score/length_correlation" in row for row in live.values())
    assert all(metric_meaning(name) for row in live.values() for name in row)
    told = {s.number: s.row for s in read_story(tmp_path).steps}
    page = DashboardRun(tmp_path, lambda story: [])
    while page.poll_journal():
        pass
    for step in range(2, 6):
        assert {k: v for k, v in told[step].items() if k.startswith(OF_ANSWERS)} == live[step]
        row = MetricRow(page.columns, page.columns.steps.index(step))
        assert {k: v for k, v in row.items() if k.startswith(OF_ANSWERS)} == live[step]
