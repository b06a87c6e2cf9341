"""Whether the video that a flow drew moves in the direction of its prompt."""

from __future__ import annotations

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import ConfigError, DataError
from rondel.core.moving_dots import DIRECTIONS, moved_along
from rondel.core.types import Task, Trajectory


class Motion:
    """Mean correlation of each frame with the one before it, moved a pixel in the prompt's direction; at least 0.

    frames, side  of a grayscale video of frames·side·side numbers
    """

    def __init__(self, *, frames: int = 4, side: int = 8) -> None:
        if frames < 2 or side < 2:
            raise ConfigError(f"reward 'motion': frames = {frames}, side = {side}; each is at least 2")
        self.frames, self.side = frames, side

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        steps, shape = trajectory.steps, (self.frames, self.side, self.side)
        if not isinstance(steps, ContinuousSteps) or steps.dim != self.frames * self.side**2:
            raise ValueError(
                f"reward 'motion' wants a video of {'·'.join(map(str, shape))} numbers, which a flow draws"
            )
        if (wanted := str(task.data.get("prompt", ""))) not in DIRECTIONS:
            raise DataError(
                f"reward 'motion': the prompt of task {task.id} is none of {', '.join(DIRECTIONS)}: {wanted:.40}"
            )
        return max(0.0, moved_along(steps.drawn[-1].astype("float64").reshape(shape), wanted))
