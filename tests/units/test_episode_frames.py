"""Frames of episodes: what was done is done again, and must show the same."""

from __future__ import annotations

import base64
import json
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from starlette.testclient import TestClient

from rondel.cli.episode_frames import FRAMES, acted_steps, actions_per_step, frame_grid
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.dashboard.pages import DashboardPages, build_app
from rondel.dashboard.run import DashboardRun
from rondel.planner.plan import make_plan
from rondel.runtime.journal.store import read_step, write_step
from rondel.runtime.telemetry.drawn_images import encode_png

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


class Pushed(Dot):
    """The same, pushed by the sign of a number, until it is at an end of the line."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        seen, reward, *_ = super().step(int(action[0] > 0))
        return seen, reward, self.at in (0, 8), False, {}


for kind in (Dot, Blind, Pushed):
    gymnasium.register(f"Rondel{kind.__name__}-v0", kind, disable_env_checker=True)


def played(seed: int, actions: list[int], world: str = "RondelDot-v0", **args) -> dict:
    env = gymnasium.make(world, **args)
    seen, rows = env.reset(seed=seed)[0], []
    for action in actions:
        rows.append([seen[0], action])
        seen = env.step(action)[0]
    return stored_row(ContinuousSteps(np.array(rows, np.float32), observed=1), world, seed, args)


def stored_row(steps: ContinuousSteps, world: str, seed: int, args: dict) -> dict:
    return {
        "steps": steps.stored,
        "steps_layout": steps.layout,
        "task_data": {"world": world, "seed": seed, "args": args},
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


def in_chunks(seed: int, chunks: list[list[float]], *, cut: int | None = None) -> dict:
    """An episode whose policy draws 3 actions by 2 denoising steps; cut off behind so many actions."""
    env = gymnasium.make("RondelPushed-v0")
    seen, rows, over = env.reset(seed=seed)[0], [], False
    taken = 0
    for chunk in chunks:
        assert not over
        rows.append([seen[0], *range(6), *chunk])
        for action in chunk:
            seen, _, over, *_ = env.step(np.array([action], np.float32))
            taken += 1
            if over or taken == cut:
                break
    steps = ContinuousSteps(np.array(rows, np.float32), observed=1, after=None if cut is None else seen)
    return stored_row(steps, "RondelPushed-v0", seed, {})


@pytest.mark.parametrize("cut", [None, 5, 4])
def test_chunks_are_shown_at_the_observations_of_the_policy(cut):
    """The rest of a chunk is not taken behind the end of the episode, nor where it was cut off."""
    chunks = [[-1, -1, 1], [-1, -1, -1], [-1, -1, -1]] if cut is None else [[1, 1, -1], [-1, 1, 1]]
    row = in_chunks(5, chunks, cut=cut)
    begin = int(row["steps"][0, 0])
    ends = [5, *([4, 1, 0] if cut is None else [6, 6 if cut == 5 else 5])]
    assert begin == 5
    grid = frame_grid([row], actions=3)
    for j in range(FRAMES):
        frame = grid[1:3, j * 10 + 1 : j * 10 + 10]
        assert j >= len(ends) or (frame[:, ends[j]] == [1, 0, 0]).all()
        assert (frame == 0.5).all() == (j >= len(ends))
    with pytest.raises(UserError, match="showed something else at step 1"):
        frame_grid([row], actions=9)
    if cut is not None:  # what stood behind its end is compared, too
        other = row["steps"].copy()
        other[-1, 0] += 9
        with pytest.raises(UserError, match="showed something else at step 2"):
            frame_grid([row | {"steps": other}], actions=3)


def test_a_run_says_how_many_actions_are_drawn_at_once(tmp_path):
    def told(path: str, saved: dict | None = None) -> int:
        if saved is not None:
            folder = tmp_path / "checkpoints" / "step-000002"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
            (folder / "config.json").write_text(json.dumps(saved))
        return actions_per_step(tmp_path, tomllib.loads(f"[model]\npath = {path}\n"))

    assert told('{ random = "mlp_policy" }') == 1 and told('{ random = "flow_policy", chunk = 7 }') == 7
    assert told('{ random = "flow_policy" }') == 4 and told('"gone"') == 1
    assert told('"gone"', {"model_type": "flow_policy", "chunk": 3}) == 3


@pytest.mark.slow
def test_the_dashboard_shows_the_frames_that_the_terminal_writes(tmp_path):
    """Of an episode of CartPole, drawn by a process of its own; what cannot be drawn is a sentence."""
    pytest.importorskip("pygame", reason="pip install pygame-ce")

    def stored(seed: int, moved: float = 0.0) -> Trajectory:
        actions = [0, 1] * 6
        env, rows = gymnasium.make("CartPole-v1"), []
        seen = env.reset(seed=seed)[0]
        for action in actions:
            rows.append([*seen, action])
            seen = env.step(action)[0]
        trajectory = Trajectory(score=Score(float(len(actions))))
        trajectory.extend([0])
        n, steps = len(actions), ContinuousSteps(np.array(rows, np.float32) + np.float32(moved), observed=4, after=seen)
        trajectory.extend(actions, logprobs=[-0.5] * n, versions=[0] * n, steps=steps)
        return trajectory

    task = Task("CartPole-v1/5", "control", {"world": "CartPole-v1", "seed": 5})
    write_step(tmp_path, 1, [Group(0, task, [stored(5), stored(5, moved=0.1)], 0)])
    pages = DashboardPages([DashboardRun(tmp_path, lambda story: [])], make_plan)
    asked = TestClient(build_app(pages), base_url="http://127.0.0.1")
    assert asked.get("/api/answer?step=1&at=0").json()["episode"] is True
    reply = asked.get("/api/frames?step=1&at=0")
    kind, _, data = reply.json()["png"].partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == encode_png(frame_grid(read_step(tmp_path, 1)[:1]))
    assert "img-src 'self' data:" in reply.headers["content-security-policy"]
    reply = asked.get("/api/frames?step=1&at=1")
    assert reply.status_code == 400 and "showed something else at step 0 of episode 0.1" in reply.json()["error"]
    assert "no number 7" in asked.get("/api/frames?step=1&at=7").json()["error"]
    assert not list(Path(tmp_path).glob("*.png"))


def test_what_cannot_be_shown_is_named():
    row = played(5, [1, 0])
    other = row | {"task_data": row["task_data"] | {"seed": 6}}
    other["steps"] = row["steps"] + np.float32(1)
    with pytest.raises(UserError, match=r"showed something else at step 0 of episode 3\.0"):
        frame_grid([other])
    with pytest.raises(UserError, match=r"cannot draw itself: RuntimeError; pip install pygame-ce"):
        frame_grid([played(5, [1], "RondelBlind-v0")])
    chunks = row["steps"][:, [0, 1, 1, 1]]
    with pytest.raises(UserError, match=r"episode 3\.0 drew 3 numbers at once, and the run's policy takes 1 actions"):
        frame_grid([row | {"steps": chunks}])
    with pytest.raises(UserError, match="imports none of it"):
        frame_grid([row | {"task_data": row["task_data"] | {"world": "theirs:Dot"}}])
    with pytest.raises(UserError, match="no episode of a world"):
        frame_grid([row | {"agent": "world.observed"}, row | {"steps": None}])
    assert acted_steps(row | {"task_data": {"prompt": "3"}}) is None
