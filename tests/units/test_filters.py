"""Group -> Verdict: what is kept, what is dropped, under which reason, and what is booked as a failure."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rondel.algos.tokens import repeated_fraction
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import ConfigError
from rondel.core.types import KEEP, Completion, EnvFault, Failed, Group, Score, Task, Trajectory, Verdict
from rondel.filter import FILTERS, chain_filters
from rondel.filter.complete import Complete
from rondel.filter.length import truncated
from rondel.filter.repetition import Repetition
from rondel.filter.signal import signal
from rondel.generate.envs.stepped_episode import SteppedEpisode


def group(*trajectories: Trajectory) -> Group:
    return Group(0, Task("t", "fake", {}), list(trajectories), born=0)


def scored(*rewards: float) -> list[Trajectory]:
    return [Trajectory(score=Score(r)) for r in rewards]


def wrote(tokens: list[int], *more: tuple[list[int], bool]) -> Trajectory:
    trajectory = Trajectory()
    for part, own in ((tokens, True), *more):
        trajectory.extend(part, **({"logprobs": [-1.0] * len(part), "versions": [0] * len(part)} if own else {}))
    return trajectory


BROKEN, TIMEOUT = Trajectory(score=Failed("verifier")), Trajectory(outcome=EnvFault("timeout"))
ENDED, CUT = Trajectory(finish_reason="stop"), Trajectory(finish_reason="length")


@pytest.mark.parametrize(
    "rewards,keep",
    [((0, 1), True), ((0.5, 0.5, 0.5), False), ((0, 0, 0, 1e-9), True), ((1,), True), ((), True)],
)
def test_signal_is_a_difference(rewards, keep):
    assert signal(group(*scored(*rewards))) == (KEEP if keep else Verdict(False, "unanimous"))


def test_signal_does_not_count_a_failure_as_a_different_reward():
    assert signal(group(*scored(1, 1), BROKEN)) == Verdict(False, "unanimous")


def test_a_group_is_dropped_when_nobody_ended():
    assert truncated(group(CUT, CUT)) == Verdict(False, "truncated")
    assert truncated(group(CUT, ENDED)) == KEEP


def test_an_episode_of_actions_that_a_time_limit_ended_is_not_truncated():
    """CartPole at its 500th step; the last answer is one of text."""
    played, limit = (SteppedEpisode(Trajectory(), 4) for _ in range(2))
    for episode, ended in ((played, "ended"), (limit, "cut off")):
        steps = ContinuousSteps(np.zeros((1, 5), np.float32), 4)
        done = Completion([0], [-0.5], [0], "stop", 1, steps=steps)
        episode.add(done, 1.0, np.zeros(4, np.float32), ended)
    found = [played.finish(), limit.finish(), CUT]
    assert [t.finish_reason for t in found] == ["stop", "length", "length"]
    assert [t.is_truncated for t in found] == [False, False, True] and truncated(group(*found[:2], found[1])) == KEEP


@pytest.mark.parametrize(
    "trajectory,n,share",
    [
        (wrote([1, 2, 3, 4]), 2, 0.0),
        (wrote([1, 1, 1, 1, 1]), 2, 3 / 4),  # 4 bigrams, 1 of them new
        (wrote([1, 2, 1, 2, 1]), 2, 2 / 4),
        (wrote([1, 2]), 3, None),  # too short to repeat anything
        (wrote([1, 2], ([9], False), ([1, 2], True)), 2, 1 / 2),  # a bigram across the given 9 does not count
        (wrote([1], ([7, 7, 7, 7], False)), 2, None),  # nor do the bigrams the policy did not write
    ],
)
def test_the_share_of_repeated_ngrams(trajectory, n, share):
    found = repeated_fraction(trajectory.tokens, trajectory.mask, n)
    assert found is None if share is None else found == pytest.approx(share)


def test_repetition_judges_the_mean_of_the_group():
    loop, fine = wrote([5] * 20), wrote(list(range(20)))
    assert Repetition(n=2)(group(loop, loop, fine)) == Verdict(False, "repetitive")
    assert Repetition(n=2)(group(loop, fine)) == KEEP and Repetition()(group()) == KEEP


def test_too_few_scored_is_a_failure_under_its_commonest_reason():
    assert Complete()(group(*scored(0, 1), BROKEN, BROKEN)) == KEEP
    assert Complete()(group(*scored(0), BROKEN, TIMEOUT, TIMEOUT)) == Verdict(False, "timeout", failed=True)
    assert Complete(3)(group(*scored(0, 1), BROKEN)) == Verdict(False, "verifier", failed=True)
    assert Complete()(group(Trajectory(), Trajectory())) == Verdict(False, "unscored", failed=True)
    assert Complete()(group(*scored(1))) == Verdict(False, "too few samples", failed=True)
    assert Complete(1)(group(*scored(1))) == KEEP
    assert Complete(1)(group()) == Verdict(False, "too few samples", failed=True)


def test_a_chain_gives_the_first_verdict_that_drops():
    judge = chain_filters([Complete(), signal, truncated])
    assert judge(group(*scored(1), BROKEN)) == Verdict(False, "verifier", failed=True)
    assert judge(group(*scored(1, 1))) == Verdict(False, "unanimous")
    assert judge(group(*scored(0, 1))) == KEEP == chain_filters([])(group())


def test_every_name_makes_a_filter():
    whole = group(*(Trajectory(score=Score(r)) for r in (0.0, 1.0)))
    assert list(FILTERS) == ["complete", "signal", "truncated", "repetition", "stub"]
    assert all(make()(whole) == KEEP for make in FILTERS.values())


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Repetition(n=0), "n = 0; an n-gram has at least 1 token"),
        (lambda: Repetition(at_most=1.5), "at_most = 1.5; it is a share in [0, 1]"),
        (lambda: Complete(0), "at_least = 0; a group without a scored trajectory cannot be trained"),
    ],
)
def test_a_knob_out_of_range_is_named(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_a_filter_starts_without_torch():
    code = "import sys, rondel.filter; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
