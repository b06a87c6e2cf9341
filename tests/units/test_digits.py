"""Images of digits: where they come from, what reads them, and how drawn ones are shown."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rondel.cli.point_coverage import describe_coverage
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.digits import load_digit_images
from rondel.core.errors import ConfigError, DataError, UserError
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.points import find_points
from rondel.runtime.telemetry.drawn_images import as_image, draw_as_text, image_grid, write_png
from rondel.runtime.telemetry.run_images import before_and_after
from rondel.score import build_reward


def rows_of(drawn, **data):
    """Stored trajectories of one step each, under the prompts of `data`."""
    steps = ContinuousSteps.of(drawn, drawn, sigma=0.5, scale_x=1.0, scale_v=-0.1, std=0.1)
    return [
        {
            "steps": steps.rows[i : i + 1],
            "text": "0.1",
            "task": "t",
            "task_data": data,
            "group": i // 2,
            "sample": i % 2,
        }
        for i in range(len(drawn))
    ]


@pytest.mark.slow
def test_the_images_and_the_classifier_that_reads_them():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: rondel[digits]")
    known = find_points("digits", {})
    assert list(known) == [str(digit) for digit in range(10)] and sum(map(len, known.values())) == 1797
    assert all(own.shape[1] == 64 and own.min() == -1 and own.max() == 1 for own in known.values())
    reward, found = build_reward("digit"), []
    for prompt, own in known.items():
        for row in rows_of(own[:20]):
            t = Trajectory()
            t.extend([1])
            t.extend([0], logprobs=[0.0], versions=[0], steps=ContinuousSteps(row["steps"]))
            found.append(reward(t, Task("t", "flow", {"prompt": prompt})))
    assert np.mean(np.array(found) > 0.5) > 0.95 and 0 <= min(found) <= max(found) <= 1
    assert build_reward({"kind": "digit", "digit": 9})(t, Task("t", "flow", {})) == found[-1]
    with pytest.raises(DataError, match="no digit: 'nine'"):
        reward(t, Task("t", "flow", {"prompt": "nine"}))
    with pytest.raises(ValueError, match="8·8 pixels"):
        reward(Trajectory(), Task("t", "flow", {"prompt": "9"}))
    with pytest.raises(ConfigError, match="digit = 10"):
        build_reward({"kind": "digit", "digit": 10})
    first = known["3"][:4]
    assert describe_coverage(rows_of(first, prompt="3", points={"name": "digits", "args": {}})) == (
        "4 points are nearest to 4 of the 1797 data points, 0.00 away on average; 4 of 4 to one of their own prompt"
    )


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    load_digit_images.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'rondel\[digits\]'"):
        find_points("digits", {})


def test_points_are_counted_by_the_data_that_they_are_nearest_to():
    data = find_points("ring", {"size": 40})["ring"]
    rows = rows_of(data[[3, 3, 7, 9]] + 1e-4, prompt="ring", points={"name": "ring", "args": {"size": 40}})
    assert describe_coverage(rows) == "4 points are nearest to 3 of the 40 data points, 0.00 away on average"
    assert describe_coverage(rows_of(data[:2], points={"name": "os:getcwd", "args": {}})) == ""
    assert describe_coverage([dict(rows[0], steps=None)]) == ""


def test_images_are_shown_in_characters_and_as_a_file(tmp_path):
    images = pytest.importorskip("PIL.Image", reason="pillow is not installed: rondel[vision]")
    point = np.linspace(-1.2, 1.2, 16)
    image = as_image(point)
    assert as_image(point[:4]) is None and as_image(point[:15]) is None and image.min() == 0 and image.max() == 1
    assert draw_as_text(image).splitlines()[0] == "      .." and draw_as_text(image)[-2:] == "@@"
    grid = image_grid(rows_of(np.stack([point, -point, point]), prompt="3"))
    assert grid.shape == (4 * 11, 4 * 11) and np.allclose(grid[4:20:4, 4:20:4], image)
    write_png(tmp_path / "grid.png", grid)
    read = np.asarray(images.open(tmp_path / "grid.png"))
    assert np.array_equal(read, np.rint(grid * 255).astype(np.uint8))
    with pytest.raises(UserError, match="no image"):
        image_grid(rows_of(np.zeros((1, 2))))


def test_the_first_and_the_last_step_of_rl_are_set_below_each_other():
    point = np.linspace(-1, 1, 16)
    drawn = {2: np.stack([point] * 20), 3: np.stack([point, -point]), 7: np.stack([-point] * 3)}
    job = {"task": {"env": {"kind": "flow"}}, "loop": {"warmup": {"steps": 2}}}
    found, steps = before_and_after(job, [1, 2, 3, 7], lambda step: rows_of(drawn[step], prompt="3"))
    assert steps == (3, 7) and found.shape == (4 * (6 + 2 + 11), 4 * 11)
    above, below = (image_grid(rows_of(drawn[step], prompt="3")) for step in steps)
    assert np.array_equal(found[:24, : above.shape[1]], above) and np.array_equal(found[32:], below)
    many = rows_of(np.stack([point] * 20), prompt="3")
    assert image_grid(many, most=(6, 1)).shape == (4 * 31, 4 * 6)
    assert before_and_after(job, [1, 2], lambda step: many) is None, "demonstrations are nobody's drawing"
    assert before_and_after({"task": {"env": "single_turn"}}, [3], lambda step: many) is None
    assert before_and_after(job, [3], lambda step: rows_of(np.zeros((2, 2)))) is None, "points of a plane"
