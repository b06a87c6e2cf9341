"""A world of pictures in a few lines: a ball falls, and a paddle below it is to be where it lands."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

BALL, PADDLE, CELL = (250, 80, 60), (80, 200, 250), 28  # colours; pixels of a side of a cell


class Catch(gymnasium.Env[np.ndarray, int]):
    """`Catch(size=4)`: size² cells. A ball begins in any column of the upper row and a paddle in any of the lower one;
    with each action (0 left, 1 stay, 2 right) the ball falls by a row.
    The last one pays 1 where the paddle has caught it.

    A policy that does not look catches one ball in `size`; any ball can be caught. The observation is [row and column
    of the ball, column of the paddle].
    """

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, size: int = 4, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode
        self.observation_space = gymnasium.spaces.Box(0, size - 1, (3,), np.float32)
        self.row, self.ball, self.paddle = 0, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.row = 0
        self.ball, self.paddle = map(int, self.np_random.integers(self.size, size=2))
        return self._shown(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.row, self.paddle = self.row + 1, min(max(self.paddle + action - 1, 0), self.size - 1)
        landed = self.row == self.size - 1
        return self._shown(), float(landed and self.ball == self.paddle), landed, False, {}

    def render(self) -> np.ndarray:
        cells = np.zeros((self.size, self.size, 3), np.uint8)
        cells[-1, self.paddle], cells[self.row, self.ball] = PADDLE, BALL
        return cells.repeat(CELL, 0).repeat(CELL, 1)

    def _shown(self) -> np.ndarray:
        return np.array([self.row, self.ball, self.paddle], np.float32)


class SmoothCatch(gymnasium.Env[np.ndarray, np.ndarray]):
    """`SmoothCatch(size=4)`: Catch whose action is a number in [-1, 1], the columns by which the paddle moves; columns
    are 0 to size - 1. The last one pays 1 where the paddle is less than half a column away from the ball.

    A policy that does not look catches at most one ball in `size`, for no place of the paddle catches two; any ball can
    be caught. The observation is [row and column of the ball, column of the paddle].
    """

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, size: int = 4, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode
        self.observation_space = gymnasium.spaces.Box(0, size - 1, (3,), np.float32)
        self.row, self.ball, self.paddle = 0, 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        ball, paddle = self.np_random.integers(self.size, size=2)
        self.row, self.ball, self.paddle = 0, int(ball), float(paddle)
        return self._shown(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.row, self.paddle = self.row + 1, min(max(self.paddle + float(action[0]), 0.0), self.size - 1.0)
        landed = self.row == self.size - 1
        return self._shown(), float(landed and abs(self.ball - self.paddle) < 0.5), landed, False, {}

    def render(self) -> np.ndarray:
        frame = np.zeros((self.size * CELL, self.size * CELL, 3), np.uint8)
        first, top, left = round(self.paddle * CELL), self.row * CELL, self.ball * CELL
        frame[-CELL:, first : first + CELL] = PADDLE
        frame[top : top + CELL, left : left + CELL] = BALL
        return frame

    def _shown(self) -> np.ndarray:
        return np.array([self.row, self.ball, self.paddle], np.float32)


def reach_ball(observation: np.ndarray) -> np.ndarray:
    """To where the ball will land, as far as one action goes."""
    _, ball, paddle = observation
    return np.clip(np.array([ball - paddle], np.float32), -1, 1)


def follow_ball(observation: np.ndarray) -> int:
    """A step to where the ball will land."""
    _, ball, paddle = observation
    return int(np.sign(ball - paddle)) + 1
