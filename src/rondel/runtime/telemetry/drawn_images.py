"""Points that a flow drew, as a reader sees them: square grayscale images."""

from __future__ import annotations

import base64
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
from rondel.core.errors import UserError
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


def image_of(row: dict[str, Any]) -> np.ndarray | None:
    """[side, side] what a stored trajectory drew, where that is an image."""
    point = last_point(row)
    return None if point is None else as_image(point)


def image_grid(rows: Iterable[dict[str, Any]], *, most: tuple[int | None, int | None] = (None, None)) -> np.ndarray:
    """[height, width] from 0 to 1: groups below each other by their prompts, samples beside each other; `most` of
    each. UserError without images.
    """

    def place(row: dict[str, Any]) -> tuple[str, int]:
        return str(row["task_data"].get("prompt", row["task"])), row["group"]

    lines = [
        [image for row in own if (image := image_of(row)) is not None][: most[1]]
        for _, own in groupby(sorted(rows, key=lambda row: (*place(row), row["sample"])), key=place)
    ]
    if not (lines := [line for line in lines if line][: most[0]]):
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


def png_address(image: np.ndarray) -> str:
    """An image as the source of an <img>."""
    return f"data:image/png;base64,{base64.b64encode(encode_png(image)).decode()}"


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
