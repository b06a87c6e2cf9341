"""Frames of episodes: what was done is done again, and must show the same."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from rondel.cli.episode_frames import FRAMES, acted_steps, frame_grid
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError

gymnasium = pytest.importorskip("gymnasium", reason="pip install gymnasium")


class Dot(gymnasium.Env):
    """A dot on a line of 9 pixels begins where its seed says and goes left or right."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, wide=False):
        self.render_mode, self.wide = render_mode, wide

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(3, 6))
        return np.array([self.at], np.float32), {}

    def step(self, action):
        self.at += 2 * action - 1
        return np.array([self.at], np.float32), 1.0, False, False, {}

    def render(self):
        picture = np.zeros((2, 400 if self.wide else 9, 3), np.uint8)
        picture[:, self.at, 0] = 255
        return picture


class Blind(Dot):
    def render(self):
        raise RuntimeError("no library")


for kind in (Dot, Blind):
    gymnasium.register(f"Rondel{kind.__name__}-v0", kind, disable_env_checker=True)


def played(seed: int, actions: list[int], world: str = "RondelDot-v0", **args) -> dict:
    env = gymnasium.make(world, **args)
    seen, rows = env.reset(seed=seed)[0], []
    for action in actions:
        rows.append([seen[0], action])
        seen = env.step(action)[0]
    steps = ContinuousSteps(np.array(rows, np.float32), observed=1)
    data = {"world": world, "seed": seed, "args": args}
    return {
        "steps": steps.stored,
        "steps_layout": steps.layout,
        "task_data": data,
        "agent": "",
        "group": 3,
        "sample": 0,
    }


def test_frames_show_where_it_was():
    actions = [1, 1, 0, 0, 0, 0, 1]
    row = played(5, actions)
    grid = frame_grid([row, played(7, [0, 1])])
    assert grid.shape == (2 * 3 + 1, FRAMES * 10 + 1, 3)
    begin = int(row["steps"][0, 0])
    places = [begin, *(begin + np.cumsum([2 * a - 1 for a in actions]))]
    for j, place in enumerate(places):
        frame = grid[1:3, j * 10 + 1 : j * 10 + 10]
        assert (frame[:, place] == [1, 0, 0]).all() and frame[..., 0].sum() == 2


def test_a_short_episode_has_as_many_frames_as_steps_and_a_wide_world_fewer_pixels():
    grid = frame_grid([played(7, [0, 1], wide=True)])
    frame = -(-400 // 3)  # at most 160 pixels: every third
    assert grid.shape == (1 + 2, FRAMES * (frame + 1) + 1, 3)
    assert [bool((grid[1:2, j * (frame + 1) + 1 : (j + 1) * (frame + 1)] != 0.5).any()) for j in range(4)] == [
        True,
        True,
        True,
        False,
    ]


def test_what_cannot_be_shown_is_named():
    row = played(5, [1, 0])
    other = row | {"task_data": row["task_data"] | {"seed": 6}}
    other["steps"] = row["steps"] + np.float32(1)
    with pytest.raises(UserError, match=r"showed something else at step 0 of episode 3\.0"):
        frame_grid([other])
    with pytest.raises(UserError, match=r"cannot draw itself: RuntimeError; pip install pygame-ce"):
        frame_grid([played(5, [1], "RondelBlind-v0")])
    chunks = row["steps"][:, [0, 1, 1, 1]]
    with pytest.raises(UserError, match=r"episode 3\.0 has chunks of actions"):
        frame_grid([row | {"steps": chunks}])
    with pytest.raises(UserError, match="imports none of it"):
        frame_grid([row | {"task_data": row["task_data"] | {"world": "theirs:Dot"}}])
    with pytest.raises(UserError, match="no episode of a world"):
        frame_grid([row | {"agent": "world.observed"}, row | {"steps": None}])
    assert acted_steps(row | {"task_data": {"prompt": "3"}}) is None
