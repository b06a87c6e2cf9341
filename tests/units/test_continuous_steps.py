"""Points that a policy draws travel with their trajectory, bit for bit, wherever its tokens do."""

import json

import numpy as np
import pytest

from rondel.buffer.state import decode, encode
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import Completion, Group, Request, Sampling, Score, Task, Trajectory
from rondel.generate.engine.resumption import join_completions
from rondel.runtime.journal.store import groups_of, read_step, write_step
from rondel.runtime.telemetry.reward_hacking import from_scored


def steps(n: int, dim: int = 3, seed: int = 0) -> ContinuousSteps:
    noise = np.random.default_rng(seed)
    return ContinuousSteps.of(
        noise.normal(size=(n, dim)),
        noise.normal(size=(n, dim)),
        sigma=np.linspace(1, 0, n, endpoint=False),
        scale_x=noise.normal(size=n),
        scale_v=-0.1,
        std=0.25,
    )


def flown(n: int = 4) -> Trajectory:
    """A prompt of two tokens and n steps, whose densities are above 0."""
    t = Trajectory(score=Score(0.5))
    t.extend([7, 8])
    t.extend(range(n), logprobs=[1.5] * n, versions=[3] * n, steps=steps(n))
    return t


def test_columns_are_what_was_given():
    given = steps(5)
    assert (len(given), given.dim) == (5, 3) and given.x.shape == given.drawn.shape == (5, 3)
    assert given.sigma.tolist() == [1.0, np.float32(0.8), np.float32(0.6), np.float32(0.4), np.float32(0.2)]
    assert np.array_equal(given.coefficients[:, 1:], np.float32([[-0.1, 0.25]] * 5))
    assert given[:2] + given[2:] == given != steps(5, seed=1)


@pytest.mark.parametrize("folded", ["store", "buffer"])
def test_a_group_comes_back_with_the_same_bits(tmp_path, folded):
    group = Group(5, Task("points/1", "flow", {"prompt": "a"}), [flown(), flown(1)], 2)
    if folded == "store":
        write_step(tmp_path, 1, [group])
        [back] = groups_of(read_step(tmp_path, 1))
    else:
        back = decode(json.loads(json.dumps(encode(group))))
    for mine, theirs in zip(group.trajectories, back.trajectories, strict=True):
        assert theirs.steps == mine.steps and theirs.logprobs == mine.logprobs and theirs.tokens == mine.tokens


def test_spread_is_the_deviation_of_a_groups_points():
    ends = np.float32([[0, 0, 0], [2, 0, 0], [0, 2, 0], [2, 2, 0]])
    group = Group(0, Task("t", "flow", {}), [flown(1) for _ in ends], 0)
    for t, end in zip(group.trajectories, ends):
        t.steps.rows[-1, 3:6] = end
    assert from_scored([group])["generate/spread"] == pytest.approx(2**0.5)
    assert "generate/spread" not in from_scored([Group(0, group.task, [Trajectory()], 0)])


def test_pieces_of_a_sample_are_joined():
    whole = steps(5)
    pieces = [
        Completion(list(range(a, b)), [0.1] * (b - a), [1] * (b - a), why, steps=whole[a:b])
        for a, b, why in ((0, 2, "abort"), (2, 5, "stop"))
    ]
    assert join_completions(pieces).steps == whole
    assert Request([1], Sampling()).steps is None


def test_the_writer_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at most 0"):
        Trajectory().extend([1], logprobs=[0.5], versions=[0])  # a token has a probability
    with pytest.raises(ValueError, match="finite"):
        Trajectory().extend([1], logprobs=[float("inf")], versions=[0], steps=steps(1))
    with pytest.raises(ValueError, match="a step is one token"):
        Trajectory().extend([1, 2], logprobs=[0.5] * 2, versions=[0] * 2, steps=steps(1))
    with pytest.raises(ValueError, match="all have them"):
        flown().extend([1], logprobs=[-0.5], versions=[0])
    with pytest.raises(ValueError, match="one space"):
        flown().extend([1], logprobs=[-0.5], versions=[0], steps=steps(1, dim=2))
    with pytest.raises(ValueError, match="float32"):
        ContinuousSteps(np.zeros((2, 8)))
