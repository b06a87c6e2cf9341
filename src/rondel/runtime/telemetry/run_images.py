"""What a policy that draws images drew first and last, in one picture: for the run card and the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rondel.core.errors import UserError
from rondel.runtime.telemetry.drawn_images import ZOOM, image_grid

PROMPTS, SAMPLES = 6, 8  # of a step


def draws_images(job: dict[str, Any]) -> bool:
    """Whether a policy of this recipe draws points, which may be images."""
    env = job.get("task", {}).get("env")
    return (env.get("kind") if isinstance(env, dict) else env) == "flow"


def before_and_after(
    job: dict[str, Any], stored: Sequence[int], read: Callable[[int], list[dict[str, Any]]]
) -> tuple[np.ndarray, tuple[int, int]] | None:
    """([height, width], (first, last)): what the first and the last step of RL drew, below each other; None where there
    is no such step yet, or where that is no image. `job`: the recipe; `stored`: steps with
    rollouts, which `read` reads.
    """
    supervised = job.get("loop", {}).get("warmup", {}).get("steps", 0)
    steps = [step for step in stored if step > supervised] if draws_images(job) else []
    if not steps:
        return None
    try:
        grids = [image_grid(read(step), most=(PROMPTS, SAMPLES)) for step in (steps[0], steps[-1])]
    except UserError:
        return None
    width = max(grid.shape[1] for grid in grids)
    wide = [np.pad(grid, ((0, 2 * ZOOM), (0, width - grid.shape[1])), constant_values=1.0) for grid in grids]
    return np.concatenate(wide)[: -2 * ZOOM], (steps[0], steps[-1])
