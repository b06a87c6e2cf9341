"""Points to learn from, and the demonstrations that are made of them."""

import math

import numpy as np
import pytest
import torch

from kits.flows import flow
from rondel.core.errors import DataError
from rondel.core.moving_dots import DIRECTIONS
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.flow import matching_steps
from rondel.generate.envs.points import find_points
from rondel.generate.envs.sources import load_tasks
from rondel.models.packed_steps import PackedSteps
from rondel.score.motion import Motion
from rondel.score.near import Near


def test_a_demonstration_is_flow_matching():
    """x - sigma·(noise - x0) is a data point, and the log-density of the step is the loss and a constant."""
    data = find_points("ring", {"size": 50})["ring"]
    steps = matching_steps(data, 40, key=7)
    x0 = steps.x - steps.sigma[:, None] * steps.drawn
    assert np.abs(x0[:, None] - data[None]).max(-1).min(1).max() < 1e-5
    assert steps == matching_steps(data, 40, key=7) != matching_steps(data, 40, key=8)
    head = flow().head
    packed = PackedSteps.of([steps.rows], [[1, 2]], "cpu", torch.float64)
    head.model.double()
    with torch.no_grad():
        density = head.evaluate_steps(packed)[0]
        velocity = head.velocity(packed.rows[:, :2], packed.rows[:, 4], packed)
    loss = ((velocity - packed.rows[:, 2:4]) ** 2).mean(1)
    assert torch.allclose(density, -0.5 * loss - 0.5 * math.log(2 * math.pi), rtol=0, atol=1e-10)


def test_the_ring_has_its_modes():
    points = find_points("ring", {"modes": 4, "radius": 2.0, "spread": 0.05})["ring"]
    angles = np.arctan2(points[:, 1], points[:, 0]) / (np.pi / 2)
    assert np.abs(np.hypot(*points.T) - 2).max() < 0.3 and np.abs(angles - angles.round()).max() < 0.2
    assert np.bincount(angles.round().astype(int) % 4).min() > 900


def test_points_of_ones_own():
    own = find_points("kits.flows:corners", {"n": 3})
    assert {prompt: points.shape for prompt, points in own.items()} == {"low": (3, 3), "high": (3, 3)}
    tasks = load_tasks({"kind": "points", "name": "kits.flows:corners", "holdout": 0.0}, env="flow").train
    assert {task.data["prompt"] for task in tasks} == {"low", "high"} and all(t.env == "flow" for t in tasks)
    for name, args, why in (("kits.flows:nowhere", {}, "finite numbers"), ("ring", {"moods": 3}, "moods")):
        with pytest.raises(DataError, match=why):
            find_points(name, args)


def test_a_dot_moves_as_its_prompt_says():
    """Each video is the same dot one pixel further in every frame; the reward is 1 for its own prompt and less for others."""
    found = find_points("moving", {"frames": 3, "side": 6})
    assert {prompt: points.shape for prompt, points in found.items()} == dict.fromkeys(DIRECTIONS, (36, 108))
    video = found["down"][7].reshape(3, 6, 6)
    assert np.argmax(video[0]) == 7 and np.argmax(video[2]) == 7 + 2 * 6 and video.max() == 1 > -0.9 > video.min()
    reward, paid = Motion(frames=3, side=6), {}
    for prompt, points in found.items():
        t = Trajectory()
        t.extend([1])
        steps = matching_steps(points[:1], 1, key=1)
        steps.rows[-1, 108:216] = points[9]
        t.extend([0], logprobs=[0.0], versions=[0], steps=steps)
        paid[prompt] = [reward(t, Task("t", "flow", {"prompt": other})) for other in DIRECTIONS]
        assert max(paid[prompt]) == paid[prompt][list(DIRECTIONS).index(prompt)] == pytest.approx(1)
        assert sorted(paid[prompt])[-2] < 0.6
    steps.rows[:] = 0.5  # all gray
    assert reward(t, Task("t", "flow", {"prompt": "up"})) == 0
    with pytest.raises(DataError, match="none of right"):
        reward(t, Task("t", "flow", {"prompt": "sideways"}))
    with pytest.raises(ValueError, match="wants a video"):
        Motion()(t, Task("t", "flow", {"prompt": "up"}))


def test_near_pays_for_the_last_point_alone():
    steps = matching_steps(np.zeros((1, 2)), 2, key=1)
    steps.rows[-1, 2:4] = 0.3, 0.4
    t = Trajectory()
    t.extend([1])
    t.extend([0, 1], logprobs=[0.0, 0.0], versions=[0, 0], steps=steps)
    task = Task("t", "flow", {})
    assert Near(points=[[0.0, 0.0], [9.0, 9.0]], width=0.5)(t, task) == pytest.approx(math.exp(-0.25 / 0.5))
    with pytest.raises(ValueError, match="a flow draws"):
        Near(points=[[0.0, 0.0]])(Trajectory(), task)
