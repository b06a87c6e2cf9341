"""A function of the user's that values the steps of an answer,
and what it has said of one that is still being written."""

from __future__ import annotations

import asyncio
import inspect
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.registry import import_attribute
from rondel.core.types import Failed, Task

SAME = 1e-5  # of its size, or of 1: values of a step before and after the next one was written


@dataclass
class ValuedSteps:
    """The first steps of an answer, with their values."""

    steps: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def values_of(self, steps: list[str]) -> list[float]:
        """Of the first of these steps, if all of its own are among them."""
        n = len(self.steps)
        return self.values if steps[:n] == self.steps else []


class StepScorer:
    """`StepScorer("module:name", together=64, pipelined=False)`: (steps, task) -> values, plain or async.

    With a parameter `first` the function is to value steps[first:] alone, which `pipelined` needs: a step is then
    valued once. The first answer that was valued in pieces is valued as a whole, too; where the two differ, `agrees` is
    False from then on and `warning` says so.
    """

    def __init__(self, path: str, *, together: int, pipelined: bool) -> None:
        self.scorer = import_attribute("process scorer", path)
        self._takes_first = "first" in inspect.signature(self.scorer).parameters
        if pipelined and not self._takes_first:
            raise ConfigError(
                f"reward 'process': pipelined = true values each step once, so scorer = '{path}' needs a parameter "
                f"'first': (steps, task, first) -> values of steps[first:]"
            )
        self._threads = ThreadPoolExecutor(together)
        self._checked, self.agrees, self.warning = False, True, ""

    async def extend(self, valued: ValuedSteps, steps: list[str], task: Task) -> None:
        """Value what is new of these steps. A failure leaves everything as it is."""
        known = valued.values_of(steps)
        if len(known) < len(steps):
            values = await self._ask(steps, task, len(known))
            if not isinstance(values, Failed):
                valued.steps, valued.values = steps, known + values

    async def value_steps(self, steps: list[str], task: Task, valued: ValuedSteps) -> list[float] | Failed:
        """The values of a whole answer's steps, of which the first may be known."""
        known = valued.values_of(steps) if self.agrees else []
        if known and not self._checked:
            return await self._check(steps, task, known)
        if len(known) == len(steps):
            return known
        rest = await self._ask(steps, task, len(known))
        return rest if isinstance(rest, Failed) else known + rest

    async def _check(self, steps: list[str], task: Task, known: list[float]) -> list[float] | Failed:
        values = await self._ask(steps, task, 0)
        if isinstance(values, Failed):
            return values
        self._checked = True
        at = next((i for i, (x, y) in enumerate(zip(known, values)) if abs(x - y) > SAME * max(1.0, abs(y))), None)
        if at is not None:
            self.agrees = False
            self.warning = (
                f"steps are no longer valued while answers are written: the scorer gave step {at + 1} of an answer "
                f"{known[at]:g} before the next one was written, and {values[at]:g} afterwards. Leave pipelined out "
                "where a value depends on later steps, or on chance"
            )
        return values

    async def _ask(self, steps: list[str], task: Task, first: int) -> list[float] | Failed:
        ask = partial(self.scorer, steps, task, **({"first": first} if self._takes_first else {}))
        aside = not inspect.iscoroutinefunction(self.scorer)
        returned = await asyncio.get_running_loop().run_in_executor(self._threads, ask) if aside else ask()
        values = await returned if inspect.isawaitable(returned) else returned
        return values if isinstance(values, Failed) else check_values(values, len(steps) - first)


def check_values(values: Any, count: int) -> list[float] | Failed:
    """The same as a list of so many finite numbers."""
    values = list(values)
    if len(values) != count or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return Failed("steps were not valued", f"{count} steps got {values!s:.120}")
    return values
