"""Points that a flow drew, as a reader sees them: square grayscale images, and how many of the data they stand for."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.drawn_steps import steps_from_rows
from rondel.core.errors import RondelError, UserError
from rondel.system.files import guard_write

SMALLEST = 16  # numbers of a point that is shown as an image
SHADES = " .:-=+*#%@"
ZOOM = 4  # pixels of the file along one of an image


def last_point(row: dict[str, Any]) -> np.ndarray | None:
    """[D] the answer of a stored trajectory; None where it is text or actions, or a demonstration, whose steps end
    nowhere."""
    steps = None if row["steps"] is None else steps_from_rows(row["steps"], row.get("steps_layout") or 0)
    return steps.drawn[-1] if isinstance(steps, ContinuousSteps) and not steps.observed and row["text"] else None


def as_image(point: np.ndarray) -> np.ndarray | None:
    """[D] from -1 to 1 -> [side, side] from 0 to 1, cut at both ends; None where D is small or no square."""
    side = math.isqrt(len(point))
    if len(point) < SMALLEST or side * side != len(point):
        return None
    return np.clip((point.reshape(side, side) + 1) / 2, 0, 1)


def draw_as_text(image: np.ndarray) -> str:
    """Two characters a pixel, ten shades."""
    shades = np.minimum((image * len(SHADES)).astype(int), len(SHADES) - 1)
    return "\n".join("".join(2 * SHADES[shade] for shade in line) for line in shades)


def image_grid(rows: Iterable[dict[str, Any]]) -> np.ndarray:
    """[height, width] from 0 to 1: groups below each other by their prompts, samples beside each other. UserError
    without images.
    """

    def place(row: dict[str, Any]) -> tuple[str, int]:
        return str(row["task_data"].get("prompt", row["task"])), row["group"]

    lines = [
        [image for row in own if (point := last_point(row)) is not None and (image := as_image(point)) is not None]
        for _, own in groupby(sorted(rows, key=lambda row: (*place(row), row["sample"])), key=place)
    ]
    if not (lines := [line for line in lines if line]):
        raise UserError(
            f"--png: there is no image among these trajectories; it draws square points of {SMALLEST} numbers or more, "
            "of a step of RL"
        )
    side, longest = len(lines[0][0]), max(map(len, lines))
    grid = np.full((len(lines) * (side + 1) + 1, longest * (side + 1) + 1), 0.5)
    for i, line in enumerate(lines):
        for j, image in enumerate(line):
            top, left = i * (side + 1) + 1, j * (side + 1) + 1
            grid[top : top + side, left : left + side] = image
    return grid.repeat(ZOOM, 0).repeat(ZOOM, 1)


def write_png(path: str | Path, image: np.ndarray) -> None:
    """`encode_png` into a file."""
    data = encode_png(image)
    with guard_write(path, len(data), UserError):
        Path(path).write_bytes(data)


def encode_png(image: np.ndarray) -> bytes:
    """[height, width] from 0, black, to 1, white, or [height, width, 3] of red, green and blue, as an image of 8 bits a
    number (https://www.w3.org/TR/png-3/).
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, *colours = image.shape
    flat = np.rint(image * 255).astype(np.uint8).reshape(height, -1)
    lines = np.pad(flat, ((0, 0), (1, 0)))  # 0 before each: not filtered
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if colours else 0, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def describe_coverage(rows: Iterable[dict[str, Any]]) -> str:
    """ "120 points are nearest to 97 of the 1797 data points, 3.02 away on average; 110 of 120 to one of their own prompt";
    "" where there are no points, or those to learn from are a user's own: to look at a run imports no code that it names.
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
