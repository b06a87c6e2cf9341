"""An order of tasks in two phases: every other batch asks the most valuable questions of the batch before it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rondel.core.errors import ConfigError, DataError
from rondel.core.events import Event, GroupsTaken
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.generate.envs.order import ShuffledOrder


class FocusedOrder:
    """A batch in a shuffled order, then one of the `top` questions of that batch whose value is highest, in turn, until
    it is as large; each with fresh answers of the weights that learned the first.  arXiv:2606.07950 (CoDaPO).

    value = c·(1 - 4·(d - 1/2)²), c = exp of the mean over answers of the mean log-probability of their tokens, d = 1 -
    the share of right answers. It assumes that what was within reach before a step is so after it. The batch before
    decides what comes, so it needs synchronous training, without filters.

    top     questions that are asked again
    part    part of the reward that says whether an answer is right; empty, the reward itself
    above   an answer is right where that is above this
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, top: int = 4, part: str = "", above: float = 0.5) -> None:
        if not top >= 1:
            raise ConfigError(f"task.curriculum: top = {top}; at least one question is asked again")
        self.fresh = ShuffledOrder(tasks, seed)
        self.top, self.part, self.above = top, part, above
        self.chosen: list[Task] = []  # of the focused phase; none: the original one
        self.began = self.again = self.next = 0  # where the phase began; admissions of focused ones; the next admission

    def task_at(self, n: int) -> Task:
        self.next = n + 1
        return self.chosen[(n - self.began) % len(self.chosen)] if self.chosen else self.fresh.task_at(n - self.again)

    def on_event(self, event: Event) -> None:
        if not isinstance(event, GroupsTaken) or not event.groups:
            return
        if self.chosen:
            self.again += self.next - self.began
            self.chosen = []
        else:
            ranked = sorted(event.groups, key=lambda group: (-self.value_of(group), group.id))
            self.chosen = [group.task for group in ranked[: self.top]]
        self.began = self.next

    def value_of(self, group: Group) -> float:
        """What the question of a scored group still has to teach."""
        answers = [t for t in group.policy_samples if isinstance(t.score, Score)]
        sure = [_mean_logprob(t) for t in answers if t.written]
        if not sure:
            return 0.0
        wrong = 1 - sum(self._right(t) for t in answers) / len(answers)
        return math.exp(sum(sure) / len(sure)) * (1 - 4 * (wrong - 0.5) ** 2)

    def _right(self, trajectory: Trajectory) -> bool:
        assert isinstance(trajectory.score, Score)
        if self.part and self.part not in trajectory.score.parts:
            raise DataError(
                f"task.curriculum.part = '{self.part}': the reward has no such part; it has: "
                f"{', '.join(trajectory.score.parts) or 'none'}. Name one of them, or leave it empty"
            )
        return (trajectory.score.parts[self.part] if self.part else trajectory.score.value) > self.above

    def state_dict(self) -> dict[str, Any]:
        return {
            "chosen": [[task.id, task.env, task.data] for task in self.chosen],
            "began": self.began,
            "again": self.again,
            "next": self.next,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.chosen = [Task(*task) for task in state["chosen"]]
        self.began, self.again, self.next = state["began"], state["again"], state["next"]


def _mean_logprob(trajectory: Trajectory) -> float:
    drawn = [logprob for logprob, own in zip(trajectory.logprobs, trajectory.mask, strict=True) if own]
    return sum(drawn) / len(drawn)
