"""Curricula: which tasks come more often, by how hard they are said or found to be.

EasyFirst   by a field of the task: the easiest first, more and more of the rest as the run goes
            on; a function of the admission number
ByRate      by the pass rate of each task in this run. It changes between two versions only, and
            in the order of group numbers, so a synchronous run that is resumed draws the same tasks
FocusedOrder    every other batch asks the best questions of the one before again (focused_order.py)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rondel.core.errors import ConfigError, DataError
from rondel.core.events import Event, GroupFinished, StepDone
from rondel.core.registry import find_registered
from rondel.core.types import Task
from rondel.generate.envs.focused_order import FocusedOrder
from rondel.generate.envs.order import PureOrder, ShuffledOrder, TaskAdmissions

DECAY = 0.5  # of what a task's earlier visits say, at each new one: the policy has moved since


class EasyFirst(PureOrder):
    """Admission n is drawn from the easiest start + (1 - start)·n/admissions of the tasks.

    by          a field of the task's data, small is easy; "-pass_rate" turns the order round
    start       the share of the tasks that the run begins with
    admissions  after so many all tasks take part alike
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, by: str, start: float = 0.1, admissions: int) -> None:
        if not 0 < start <= 1 or not admissions >= 1:
            raise ConfigError(
                f"task.curriculum: start = {start}, admissions = {admissions}; a share in (0, 1], and at least one "
                f"admission"
            )
        field, sign = by.removeprefix("-"), -1 if by.startswith("-") else 1
        self.tasks = sorted(tasks, key=lambda t: sign * _task_number(t, field))
        self.seed = seed
        self.start = start
        self.admissions = admissions

    def task_at(self, n: int) -> Task:
        share = self.start + (1 - self.start) * min(1.0, n / self.admissions)
        return self.tasks[int(random.Random(f"{self.seed}/{n}").random() * math.ceil(share * len(self.tasks)))]


class ByRate:
    """Admission n is drawn with probability w_i / sum(w), w_i = weight(pass rate of task i).

    The pass rate is the mean reward of a task's groups, each in [0, 1], halved in weight at
    every new visit; None before the first.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, weight: Callable[[float | None], float]) -> None:
        self.tasks, self.seed, self.weight = tasks, seed, weight
        self.place = {task.id: i for i, task in enumerate(tasks)}
        self.rates: dict[str, float] = {}
        self._ended: list[GroupFinished] = []
        self._sums = np.cumsum([weight(None)] * len(tasks))

    def task_at(self, n: int) -> Task:
        drawn = random.Random(f"{self.seed}/{n}").random() * self._sums[-1]
        return self.tasks[int(np.searchsorted(self._sums, drawn, side="right"))]

    def on_event(self, event: Event) -> None:
        if isinstance(event, GroupFinished) and event.rewards and event.task in self.place:
            self._ended.append(event)
        elif isinstance(event, StepDone) and self._ended:
            self.rates = self._rates_by_now()
            self._ended.clear()
            self._update_weights()

    def state_dict(self) -> dict[str, float]:
        """Groups that have finished since the last step are in it: the checkpoint has them, and they finish only once."""
        return self._rates_by_now()

    def load(self, state: dict[str, float]) -> None:
        self.rates = {task: rate for task, rate in state.items() if task in self.place}
        self._update_weights()

    def _rates_by_now(self) -> dict[str, float]:
        rates = dict(self.rates)
        for ended in sorted(self._ended, key=lambda e: e.number):
            passed = sum(min(1.0, max(0.0, r)) for r in ended.rewards) / len(ended.rewards)
            rates[ended.task] = DECAY * rates.get(ended.task, passed) + (1 - DECAY) * passed
        return rates

    def _update_weights(self) -> None:
        self._sums = np.cumsum([self.weight(self.rates.get(task.id)) for task in self.tasks])


def priority(tasks: Sequence[Task], seed: int, *, floor: float = 0.05) -> ByRate:
    """w = max(floor, 1 - pass rate): what fails comes more often (arXiv:2501.12599). A
    task that was not seen yet weighs 1.
    """
    _check_floor(floor)
    return ByRate(tasks, seed, lambda rate: max(floor, 1 - (rate or 0.0)))


def band(tasks: Sequence[Task], seed: int, *, low: float = 0.1, high: float = 0.9, floor: float = 0.05) -> ByRate:
    """w = 1 where low <= pass rate <= high, else floor: what always or never succeeds teaches
    nothing now, and is looked at now and then.
    """
    _check_floor(floor)
    if not 0 <= low < high <= 1:
        raise ConfigError(f"task.curriculum: low = {low}, high = {high}; 0 <= low < high <= 1")
    return ByRate(tasks, seed, lambda rate: 1.0 if rate is None or low <= rate <= high else floor)


CURRICULA: dict[str, Callable[..., TaskAdmissions]] = {
    "shuffle": ShuffledOrder,
    "easy_first": EasyFirst,
    "priority": priority,
    "band": band,
    "focused": FocusedOrder,
}


def build_curriculum(tasks: Sequence[Task], seed: int, spec: dict[str, Any]) -> TaskAdmissions:
    """Of a recipe's `task.curriculum`: `{ kind = "priority", floor = 0.05 }`."""
    settings = dict(spec)
    kind = settings.pop("kind", "shuffle")
    make = find_registered("task.curriculum.kind", kind, CURRICULA)
    try:
        return make(tasks, seed, **settings)
    except TypeError as error:
        raise ConfigError(f"task.curriculum of kind '{kind}' cannot be made from {settings}: {error}") from error


def _check_floor(floor: float) -> None:
    if not 0 < floor <= 1:
        raise ConfigError(
            f"task.curriculum: floor = {floor}; a weight in (0, 1], or what once was easy would never be seen again"
        )


def _task_number(task: Task, field: str) -> float:
    value = task.data.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise DataError(
            f"task.curriculum.by = '{field}': task {task.id} has {value!r}; every task needs a number there. It has: "
            f"{', '.join(task.data)}"
        )
    return float(value)
