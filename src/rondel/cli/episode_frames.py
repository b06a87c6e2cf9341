"""Pictures of episodes in a world: what was done is done again in a world that draws itself, and must show the same.
Where the policy has read pictures, these are stored, and they are shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
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


def actions_per_step(folder: str | Path, recipe: dict[str, Any]) -> int:
    """How many actions the policy of a run draws at once: 1, or those of a chunk. By its recipe, or where the folder
    that this names is not there by the run's newest checkpoint.
    """
    from rondel.models.control.kinds import chunk_length
    from rondel.models.model_type import model_type_of
    from rondel.system.files import checkpoints_in

    path = recipe.get("model", {}).get("path", {})
    saved = list(checkpoints_in(Path(folder) / "checkpoints").values())
    return chunk_length(path if model_type_of(path) or not saved else str(saved[-1]))


def picture_shape(folder: str | Path, recipe: dict[str, Any]) -> tuple[int, int] | None:
    """[h, w] of the pictures that the policy of a run reads, by its checkpoints; None where it reads numbers."""
    from rondel.models.control.kinds import reads_pictures
    from rondel.models.model_type import model_settings
    from rondel.system.files import checkpoints_in

    folders = [*map(str, checkpoints_in(Path(folder) / "checkpoints").values())]
    path = folders[-1] if folders else recipe.get("model", {}).get("path", {})
    if not reads_pictures(path):
        return None
    if (frame := model_settings(path).get("frame")) is None:
        raise UserError(
            "no frames: how large the policy's pictures are stands in its first checkpoint, which is to come"
        )
    return frame[0], frame[1]


def frame_grid(rows: Sequence[dict[str, Any]], actions: int = 1, pictures: tuple[int, int] | None = None) -> np.ndarray:
    """[height, width, 3] from 0 to 1: episodes below each other, FRAMES of each beside each other.

    Raises UserError where there is none, where the world cannot draw, or where it shows something else than it did:
    then its randomness is not that of its seed. `actions`: how many a step of theirs took, `actions_per_step`;
    `pictures`: `picture_shape`.
    """
    acted = [(row, steps) for row in rows if (steps := acted_steps(row)) is not None]
    strips = [
        _strip(row, steps, actions) if pictures is None else _seen_pictures(steps, pictures) for row, steps in acted
    ]
    if not strips:
        raise UserError("no frames: there is no episode of a world among these trajectories")
    height, width = (max(frame.shape[axis] for strip in strips for frame in strip) for axis in (0, 1))
    grid = np.full((len(strips) * (height + 1) + 1, FRAMES * (width + 1) + 1, 3), 0.5)
    for i, strip in enumerate(strips):
        for j, frame in enumerate(strip):
            top, left = i * (height + 1) + 1, j * (width + 1) + 1
            grid[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    return grid


def _seen_pictures(steps: ContinuousSteps, shape: tuple[int, int]) -> list[np.ndarray]:
    """What the policy read, evenly, and what came behind an episode that was cut off."""
    seen = [*steps.x, *([] if steps.after is None else [steps.after])]
    shown = sorted(set(np.linspace(0, len(seen) - 1, FRAMES).round().astype(int).tolist()))
    return [seen[i].reshape(*shape, 3).astype(np.float64) / 255 for i in shown]


def _strip(row: dict[str, Any], steps: ContinuousSteps, actions: int) -> list[np.ndarray]:
    """Frames of one episode: at observations of the policy, evenly, and at its end."""
    from rondel.generate.envs.worlds import call_world, open_world

    task, known = row["task_data"], f"episode {row['group']}.{row['sample']}"
    name = task["world"]
    if ":" in name:
        raise UserError(
            f"no frames: the world '{name}' is code that the run names, and to look at a run imports none of it"
        )
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window
    world, spaces = open_world(name, {**(task.get("args") or {}), "render_mode": "rgb_array"})
    try:
        size = actions * spaces.taken_size
        if steps.dim != size and (actions == 1 or steps.dim % size):
            raise UserError(
                f"no frames: {known} drew {steps.dim} numbers at once, and the run's policy takes {actions} actions of "
                f"{spaces.taken_size}: is job.toml or the checkpoint of another run in its folder?"
            )
        shown, _ = call_world(name, world.reset, seed=task["seed"])
        wanted = set(np.linspace(0, len(steps), FRAMES).round().astype(int).tolist())
        frames = [_drawn(name, world)]
        for at, (seen, drawn) in enumerate(zip(steps.x, steps.drawn[:, -size:], strict=True)):
            _compare(name, spaces.flatten(shown), seen, at, known)
            last = at + 1 == len(steps)
            for action in drawn.reshape(actions, -1):
                shown, _, terminated, truncated, _ = call_world(name, world.step, spaces.action(action))
                cut = last and steps.after is not None and np.array_equal(spaces.flatten(shown), steps.after)
                if terminated or truncated or cut:  # the rest of a chunk is not taken
                    break
            if at + 1 in wanted:
                frames.append(_drawn(name, world))
        if steps.after is not None:
            _compare(name, spaces.flatten(shown), steps.after, len(steps), known)
        return frames
    finally:
        world.close()


def _compare(name: str, shown: np.ndarray, seen: np.ndarray, at: int, known: str) -> None:
    if not np.array_equal(shown, seen):
        raise UserError(
            f"no frames: the world '{name}' showed something else at step {at} of {known} than it did in the run"
        )


def _drawn(name: str, world: Any) -> np.ndarray:
    """[height, width, 3] from 0 to 1, at most WIDEST pixels wide."""
    try:
        frame = np.asarray(world.render())
    except Exception as error:  # whatever a graphics library raises
        raise UserError(
            f"no frames: the world '{name}' cannot draw itself: {type(error).__name__}; {REMEDY}"
        ) from error
    if frame.ndim != 3 or frame.shape[2] != 3:
        raise UserError(f"no frames: the world '{name}' draws no pictures [height, width, 3], but {list(frame.shape)}")
    apart = -(-frame.shape[1] // WIDEST)
    return frame[::apart, ::apart].astype(np.float64) / 255
