"""Worlds of ten lines for tests; a process that runs them imports nothing else."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy as np


class Aim(gymnasium.Env[np.ndarray, np.ndarray]):
    """Shows where to aim and how much time is left; a step is paid -|action - aim|². `last`: steps until it ends."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2, 1), np.float32)
    action_space = gymnasium.spaces.Box(np.float32([-1, -2]), np.float32([1, 2]))

    def __init__(self, last: int = 3) -> None:
        self.last = last

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.at, self.aim = 0, np.random.default_rng(seed).uniform(-1, 1)
        return self._shown(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.at += 1
        return self._shown(), -float(np.square(action - self.aim).sum()), self.at >= self.last, False, {}

    def _shown(self) -> np.ndarray:
        return np.array([[self.aim], [self.at / self.last]], np.float32)


class Broken(Aim):
    def step(self, action: np.ndarray) -> Any:
        raise RuntimeError("a wheel came off")


class Blind(Aim):
    """Under every fourth seed it shows what is no number."""

    def __init__(self, shown: str = "nan") -> None:
        super().__init__()
        self.odd = float(shown)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        shown, told = super().reset(seed=seed)
        return (np.full_like(shown, self.odd) if (seed or 0) % 4 == 2 else shown), told


class Meeting(Aim):
    """A step of it lasts until four of them are under way."""

    barrier = threading.Barrier(4, timeout=20)

    def step(self, action: np.ndarray) -> Any:
        self.barrier.wait()
        return super().step(action)


class Choices(Aim):
    """The same with actions that are counted from 5, and an observation of two parts."""

    observation_space = gymnasium.spaces.Dict({"aim": Aim.observation_space, "room": gymnasium.spaces.Discrete(3)})
    action_space = gymnasium.spaces.Discrete(4, start=5)

    def step(self, action: int) -> Any:
        assert self.action_space.contains(action)
        return super().step(np.float32([0, 0]))

    def _shown(self) -> Any:
        return {"aim": super()._shown(), "room": 1}


class Words(Aim):
    observation_space = gymnasium.spaces.Text(5)


class Column(Aim):
    """Aim with one number as an action, whose picture of 40·48 pixels is light where to aim; `close` counts."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    closed = 0

    def __init__(self, last: int = 3, render_mode: str | None = None) -> None:
        super().__init__(last)
        self.render_mode = render_mode

    def render(self) -> np.ndarray:
        assert self.render_mode == "rgb_array"
        frame = np.zeros((40, 48, 3), np.uint8)
        first = int((self.aim + 1) / 2 * 36)
        frame[:, first : first + 12] = 250
        return frame


class Boundless(Aim):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
