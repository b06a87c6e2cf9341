"""Worlds of arrays for models of text and pictures: an observation is read, an action is written, as numbers of bins.

A number of an action lies between two bounds, which are cut into B bins of one width; bin b stands for its middle:

    low + (b + 1/2)·(high - low) / B                                  b = 0 .. B - 1

the discretisation of RT-2 (arXiv:2307.15818) and OpenVLA (arXiv:2406.09246), written as they are read: "3 0" are bins 3
and 0 of an action of two numbers, and "1" is action 1 of those that are counted. A bin above the last is the last, as
OpenVLA cuts them; where a number is missing it is the one in the middle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondel.core.errors import ConfigError
from rondel.generate.envs.frame_worlds import open_drawing_world, render_shrunk
from rondel.generate.envs.worlds import WorldSpaces, open_world


@dataclass(frozen=True, slots=True)
class TokenWorlds:
    """`TokenWorlds(bins=8, frames=True)("CartPole-v1")` makes a world of text as `Gym` plays it.

    bins    B, of each number of an action
    frames  what the world renders is shown, a picture of at most `pixels` a side; else the numbers of its observation
    """

    bins: int = 8
    frames: bool = False
    pixels: int = 56

    def __call__(self, name: str) -> Any:
        """What makes the world of this name, under settings of its own."""
        return lambda **args: self._open(name, args)

    def _open(self, name: str, args: dict[str, Any]) -> TokenWorld:
        world, spaces = open_drawing_world(name, args) if self.frames else open_world(name, args)
        bounds = [side for side in (spaces.low, spaces.high) if side is not None]
        if not all(np.isfinite(side).all() for side in bounds):
            raise ConfigError(
                f"the world '{name}' has actions without bounds, which no bins can cut: "
                "wrap it with bounds (gymnasium's "
                'RescaleAction), or take task.env.actions = "arrays"'
            )
        return TokenWorld(name, world, spaces, self)


@dataclass(frozen=True, slots=True)
class TokenWorld:
    """One of them."""

    name: str
    world: Any
    spaces: WorldSpaces
    how: TokenWorlds

    def reset(self, *, seed: int) -> tuple[Any, Any]:
        shown, told = self.world.reset(seed=seed)
        return self.show(shown), told

    def step(self, said: str) -> tuple[Any, float, bool, bool, Any]:
        shown, reward, terminated, truncated, told = self.world.step(self.spaces.action(self.read(said)))
        return self.show(shown), float(reward), terminated, truncated, told

    def close(self) -> None:
        self.world.close()

    def read(self, said: str) -> np.ndarray:
        """[1 or A] float32, what an answer asks for."""
        spaces = self.spaces
        size, bins = (1, spaces.actions) if spaces.discrete else (spaces.actions, self.how.bins)
        told = [min(int(word[:9]), bins - 1) for word in re.findall(r"[0-9]+", said)[:size]]
        chosen = np.array([*told, *[bins // 2] * (size - len(told))], np.float64)
        if not spaces.discrete:
            assert spaces.low is not None and spaces.high is not None
            chosen = spaces.low + (chosen + 0.5) * (spaces.high.astype(np.float64) - spaces.low) / bins
        return chosen.astype(np.float32)

    def write(self, action: Any) -> str:
        """How an action is written, the inverse of `read` up to the width of a bin: numbers [A],
        or the number of one."""
        spaces = self.spaces
        if spaces.discrete:
            return str(int(action))
        assert spaces.low is not None and spaces.high is not None
        low, width = spaces.low.astype(np.float64), spaces.high.astype(np.float64) - spaces.low
        share = (np.asarray(action, np.float64).reshape(-1) - low) / width
        return " ".join(str(int(bin)) for bin in np.clip(share * self.how.bins, 0, self.how.bins - 1))

    def show(self, shown: Any) -> Any:
        """Content of a message: a picture, or numbers."""
        if not self.how.frames:
            return " ".join(f"{number:.2f}" for number in self.spaces.flatten(shown))
        return [{"type": "image", "image": render_shrunk(self.world, self.how.pixels)}]
