"""Pictures of episodes in a world: what was done is done again in a world that draws itself, and must show the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.drawn_steps import steps_from_rows
from rondel.core.errors import UserError

FRAMES = 8  # of an episode, evenly from its first observation to its last
WIDEST = 160  # pixels of a frame
REMEDY = (
    "pip install pygame-ce for gymnasium's own worlds; MuJoCo's need a graphics library: set MUJOCO_GL to egl or osmesa"
)


def acted_steps(row: dict[str, Any]) -> ContinuousSteps | None:
    """The actions of a stored trajectory in a world, with what it showed; None of any other."""
    if row["steps"] is None or "world" not in row["task_data"] or row["agent"]:
        return None
    steps = steps_from_rows(row["steps"], row.get("steps_layout") or 0)
    return steps if isinstance(steps, ContinuousSteps) and steps.observed else None


def frame_grid(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """[height, width, 3] from 0 to 1: episodes below each other, FRAMES of each beside each other.

    Raises UserError where there is none, where the world cannot draw, or where it shows something else than it did:
    then its randomness is not that of its seed.
    """
    strips = [_strip(row, steps) for row in rows if (steps := acted_steps(row)) is not None]
    if not strips:
        raise UserError("--png: there is no episode of a world among these trajectories")
    height, width = (max(frame.shape[axis] for strip in strips for frame in strip) for axis in (0, 1))
    grid = np.full((len(strips) * (height + 1) + 1, FRAMES * (width + 1) + 1, 3), 0.5)
    for i, strip in enumerate(strips):
        for j, frame in enumerate(strip):
            top, left = i * (height + 1) + 1, j * (width + 1) + 1
            grid[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    return grid


def _strip(row: dict[str, Any], steps: ContinuousSteps) -> list[np.ndarray]:
    from rondel.generate.envs.worlds import call_world, open_world

    task, known = row["task_data"], f"episode {row['group']}.{row['sample']}"
    name = task["world"]
    if ":" in name:
        raise UserError(
            f"--png: the world '{name}' is code that the run names, and to look at a run imports none of it"
        )
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window
    world, spaces = open_world(name, {**(task.get("args") or {}), "render_mode": "rgb_array"})
    try:
        if steps.dim != spaces.taken_size:
            raise UserError(f"--png: {known} has chunks of actions, and frames are of worlds that take one at a time")
        shown, _ = call_world(name, world.reset, seed=task["seed"])
        wanted = set(np.linspace(0, len(steps), FRAMES).round().astype(int).tolist())
        frames = [_drawn(name, world)]
        for at, (seen, action) in enumerate(zip(steps.x, steps.drawn, strict=True)):
            if not np.array_equal(spaces.flatten(shown), seen):
                raise UserError(
                    f"--png: the world '{name}' showed something else at step {at} of {known} than it did in the run"
                )
            shown, *_ = call_world(name, world.step, spaces.action(action))
            if at + 1 in wanted:
                frames.append(_drawn(name, world))
        return frames
    finally:
        world.close()


def _drawn(name: str, world: Any) -> np.ndarray:
    """[height, width, 3] from 0 to 1, at most WIDEST pixels wide."""
    try:
        frame = np.asarray(world.render())
    except Exception as error:  # whatever a graphics library raises
        raise UserError(f"--png: the world '{name}' cannot draw itself: {type(error).__name__}; {REMEDY}") from error
    if frame.ndim != 3 or frame.shape[2] != 3:
        raise UserError(f"--png: the world '{name}' draws no pictures [height, width, 3], but {list(frame.shape)}")
    apart = -(-frame.shape[1] // WIDEST)
    return frame[::apart, ::apart].astype(np.float64) / 255
