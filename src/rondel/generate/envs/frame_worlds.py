"""Worlds that show the policy what they render, a small picture, instead of their observation."""

from __future__ import annotations

from typing import Any

import numpy as np

from rondel.core.errors import ConfigError
from rondel.generate.envs.worlds import WorldSpaces, call_world, open_world


class FrameWorld:
    """A world under the same verbs whose observation is a picture [h, w, 3] uint8 of at most `pixels` a side. The
    world's own observation stands in `observation`, for a scripted controller.
    """

    def __init__(self, world: Any, pixels: int) -> None:
        from gymnasium import spaces

        self.world, self.pixels, self.action_space = world, pixels, world.action_space
        self.observation, _ = world.reset(seed=0)
        shape = render_shrunk(world, pixels).shape
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def reset(self, *, seed: int) -> tuple[np.ndarray, Any]:
        self.observation, told = self.world.reset(seed=seed)
        return render_shrunk(self.world, self.pixels), told

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, Any]:
        self.observation, *rest = self.world.step(action)
        return (render_shrunk(self.world, self.pixels), *rest)  # type: ignore[return-value]

    def close(self) -> None:
        self.world.close()


def open_frame_world(name: str, args: dict[str, Any], pixels: int) -> tuple[FrameWorld, WorldSpaces]:
    """A world of pictures, and what it shows and takes."""
    inner, _ = open_drawing_world(name, args)
    world: FrameWorld = call_world(name, FrameWorld, inner, pixels)
    return world, WorldSpaces.of(name, world)


def open_drawing_world(name: str, args: dict[str, Any]) -> tuple[Any, WorldSpaces]:
    """A world that renders arrays. ConfigError where it renders nothing."""
    world, spaces = open_world(name, {"render_mode": "rgb_array", **args})
    if not callable(getattr(world, "render", None)):
        raise ConfigError(f"the world '{name}' has no render(), and task.env.frames shows what it renders")
    return world, spaces


def render_shrunk(world: Any, pixels: int) -> np.ndarray:
    """[h, w, 3] uint8, what it renders now. TypeError where that is no picture."""
    frame = world.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        found = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise TypeError(f"render() gave {found}, and a picture is an array of uint8 [height, width, 3]")
    return shrunk(frame, pixels)


def shrunk(frame: np.ndarray, pixels: int) -> np.ndarray:
    """[H, W, 3] -> each pixel the mean of a square of them, the smallest that leaves at most `pixels` a side; what is
    left at the lower and right edge is cut off."""
    factor = -(-max(frame.shape[:2]) // pixels)
    height, width = (max(1, side // factor) for side in frame.shape[:2])
    cut = frame[: height * factor, : width * factor]
    squares = cut.reshape(height, len(cut) // height, width, cut.shape[1] // width, 3)
    return squares.mean((1, 3)).round().astype(np.uint8)
