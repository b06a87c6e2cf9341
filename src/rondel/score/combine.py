"""Several rewards as one, with names and weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rondel.score.result import read
from rondel.words.errors import ConfigError, RewardError
from rondel.words.types import Failed, Score, Task, Trajectory


class Combine:
    """`Combine({"correct": (1.0, Number()), "format": (0.2, Format(tag="answer"))})` -> Score(1.2, {"correct": 1.0, "format": 0.2}).

    Parts are reported with their weight, so they add up to the value; steps keep their positions. One failed part fails the whole.
    """

    def __init__(self, parts: dict[str, tuple[float, Callable[..., Any]]]) -> None:
        if not parts or "total" in parts:
            raise ConfigError(f"reward 'combine' needs named parts, none of them called 'total'; it has: {', '.join(parts) or 'none'}")
        self.parts = parts

    async def __call__(self, trajectory: Trajectory, task: Task) -> Score:
        values: dict[str, float] = {}
        steps: list[tuple[int, float]] = []
        for name, (weight, reward) in self.parts.items():
            returned = reward(trajectory, task)
            score = read(await returned if inspect.isawaitable(returned) else returned)
            if isinstance(score, Failed):
                raise RewardError(f"part '{name}' {score.reason}")
            values[name] = weight * score.value
            steps += [(position, weight * value) for position, value in score.steps]
        return Score(sum(values.values()), values, tuple(steps))
