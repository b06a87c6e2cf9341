"""Sets of points that a flow learns from: prompt -> points [N, D], a function of the settings alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rondel.core.digits import load_digit_images
from rondel.core.errors import DataError, error_boundary
from rondel.core.moving_dots import DIRECTIONS, dot_videos
from rondel.core.registry import find_registered

Points = dict[str, np.ndarray]


def ring(modes: int = 8, spread: float = 0.1, radius: float = 1.5, size: int = 4096, seed: int = 0) -> Points:
    """Gaussians evenly on a circle, all under the prompt "ring"; mode 0 lies at (radius, 0)."""
    random = np.random.default_rng(seed)
    angles = 2 * np.pi * random.integers(modes, size=size) / modes
    centers = radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    return {"ring": centers + spread * random.standard_normal((size, 2))}


def digits() -> Points:
    """Images of 8·8 pixels under the prompts "0" to "9": some 180 of each (core/digits.py)."""
    images, labels = load_digit_images()
    return {str(digit): images[labels == digit] for digit in range(10)}


def moving(frames: int = 4, side: int = 8) -> Points:
    """Videos of a dot under the prompts "right", "left", "down" and "up": side² of each (core/moving_dots.py)."""
    return {direction: dot_videos(direction, frames=frames, side=side) for direction in DIRECTIONS}


POINTS: dict[str, Callable[..., Points]] = {"ring": ring, "digits": digits, "moving": moving}


def find_points(name: str, args: dict[str, Any]) -> Points:
    """One of ours, or what a function of the user's returns: {prompt: points [N, D]}."""
    with error_boundary(DataError, f"task.data.name = '{name}'"):
        found = {
            str(prompt): np.asarray(own, np.float64)
            for prompt, own in find_registered("points", name, POINTS)(**args).items()
        }
    if odd := [prompt for prompt, own in found.items() if own.ndim != 2 or not len(own) or not np.isfinite(own).all()]:
        raise DataError(f"task.data.name = '{name}': the points of '{odd[0]}' are no finite numbers [N, D]")
    return found
