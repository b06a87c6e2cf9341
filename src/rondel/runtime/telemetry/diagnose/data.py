"""What the tasks are: seen too often, too near to what is held out, twice the same."""

from __future__ import annotations

from collections.abc import Iterator

from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import Story

OFTEN = 25  # times that each task was trained
TWICE = 0.05  # share of tasks


def leaked(story: Story) -> Iterator[Finding]:
    tasks = story.facts.get("tasks", {})
    if tasks.get("leaked", 0) > TWICE * max(1, tasks.get("train", 0)):
        yield Finding(
            "leaked_tasks",
            "warning",
            f"{tasks['leaked']} training tasks were left out because the evaluation data has their content; "
            f"{tasks['train']} are left",
            "Both come from one source: what is left may still be close to what is held out, and the score too good.",
            "evaluation data of another origin (task.data.eval_path, eval_split); task.data.ngram says how near is the "
            "same",
        )
    if tasks.get("duplicates", 0) > TWICE * max(1, tasks.get("train", 0)):
        yield Finding(
            "duplicate_tasks",
            "note",
            f"{tasks['duplicates']} tasks were there twice, {tasks['train']} are left",
            "There is less to learn from than it seemed.",
            "look at task.data",
        )


def few_tasks(story: Story) -> Iterator[Finding]:
    tasks, trained = story.facts.get("tasks", {}).get("train", 0), story.ledger.get("trained", 0)
    if tasks and trained / tasks >= OFTEN:
        yield Finding(
            "few_tasks",
            "note",
            f"{trained} groups of {tasks} tasks: each was trained {trained / tasks:.0f} times",
            "The policy may learn the answers by heart; the training reward no longer says what it can.",
            "more tasks (task.data); trust the held-out score",
            weight=0.5,
        )


RULES = (leaked, few_tasks)
