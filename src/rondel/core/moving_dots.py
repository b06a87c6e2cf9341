"""Videos of one bright dot that moves a pixel a frame, on a sheet whose edges meet: what a small video flow learns."""

from __future__ import annotations

import numpy as np

DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}  # rows, columns a frame
WIDTH = 0.8  # pixels, of the Gaussian dot


def dot_videos(direction: str, *, frames: int, side: int) -> np.ndarray:
    """[side², frames·side·side] from -1, dark, to 1: a dot that begins in each of the pixels."""
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)
    centers = places[:, None] + np.arange(frames)[:, None] * np.array(DIRECTIONS[direction])
    apart = (places[None, None] - centers[:, :, None] + side / 2) % side - side / 2
    return (2 * np.exp(-(apart**2).sum(-1) / (2 * WIDTH**2)) - 1).reshape(len(places), -1)


def moved_along(video: np.ndarray, direction: str) -> float:
    """How well each frame [frames, rows, columns] is the one before it, moved a pixel: the mean correlation, 1 at best;
    0 for a frame of one gray.
    """
    frames = video - video.mean((1, 2), keepdims=True)
    wanted = np.roll(frames[:-1], DIRECTIONS[direction], (1, 2))
    sizes = np.sqrt((frames[1:] ** 2).sum((1, 2)) * (wanted**2).sum((1, 2)))
    return float(((frames[1:] * wanted).sum((1, 2)) / np.maximum(sizes, 1e-9)).mean())
