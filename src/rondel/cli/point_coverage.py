"""How much of the data the points that a flow drew stand for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rondel.core.errors import RondelError
from rondel.runtime.telemetry.drawn_images import last_point


def describe_coverage(rows: Iterable[dict[str, Any]]) -> str:
    """ "120 points are nearest to 97 of the 1797 data points, 3.02 away on average; 110 of 120 to one of their own
    prompt"; "" where there are no points, or those to learn from are a user's own:
    to look at a run imports no code that it names.
    """
    from rondel.generate.envs.points import POINTS, find_points

    drawn = [(row["task_data"], point) for row in rows if (point := last_point(row)) is not None]
    told = drawn[0][0].get("points") if drawn else None
    if not isinstance(told, dict) or told.get("name") not in POINTS:
        return ""
    try:
        known = find_points(told["name"], told["args"])
    except RondelError as error:
        return f"the data points were not compared: {error}"
    prompts = np.repeat(list(known), [len(own) for own in known.values()])
    points, known_points = np.stack([point for _, point in drawn]), np.concatenate(list(known.values()))
    nearest = nearest_of(points, known_points)
    away = np.linalg.norm(points - known_points[nearest], axis=1).mean()
    covered = (
        f"{len(drawn)} points are nearest to {len(set(nearest.tolist()))} of the {len(prompts)} data points, "
        f"{away:.2f} away on average"
    )
    right = sum(prompts[at] == data["prompt"] for at, (data, _) in zip(nearest, drawn))
    return covered + (f"; {right} of {len(drawn)} to one of their own prompt" if len(known) > 1 else "")


def nearest_of(points: np.ndarray, data: np.ndarray) -> np.ndarray:
    """[N] which of the data [M, D] is nearest to each of the points [N, D]."""
    return np.array([int(((data - point) ** 2).sum(1).argmin()) for point in points])
