"""How near the point that a flow drew lies to one that is wanted."""

from __future__ import annotations

import math

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import ConfigError
from rondel.core.types import Task, Trajectory


class Near:
    """exp(-d² / 2·width²), d the distance of the last point that was drawn to the nearest of `points`."""

    def __init__(self, *, points: list[list[float]], width: float = 0.5) -> None:
        if not width > 0:
            raise ConfigError(f"reward 'near': width = {width}; it must be positive")
        if not points or len({len(point) for point in points}) != 1:
            raise ConfigError("reward 'near': points is a list of points of equal length, [[1.5, 0.0], [0.0, 1.5]]")
        self.points, self.width = np.asarray(points, np.float64), width

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        steps = trajectory.steps
        if not isinstance(steps, ContinuousSteps) or steps.dim != self.points.shape[1]:
            raise ValueError(f"reward 'near' wants a point of {self.points.shape[1]} numbers, which a flow draws")
        squared = ((self.points - steps.drawn[-1]) ** 2).sum(1).min()
        return math.exp(-squared / (2 * self.width**2))
