"""The closed forms of two stages against a clock that ticks."""

from __future__ import annotations

import random

import pytest

from rondel.planner.overlap import StepTimes, engine_share, longest_answer_bound, stages_overlap


def play(R, T, U, h, S, *, shared=False, steps=40, first=10):
    """Ticks of a step, and the shares of them in which trainer and engines have nothing to do, after `first` steps.

    The engines write a step's answers in R ticks and may be S versions ahead; the trainer takes a finished step for T
    ticks and gives it out in U more, in the last h of which the engines stand still.
    """
    written = version = tick = 0
    left_to_write, left_to_train = 0, 0
    marks = []
    trainer_idle = engine_idle = 0
    while version < steps:
        if not left_to_train and written > version:
            left_to_train = T + U
        paused = (shared and left_to_train > 0) or 0 < left_to_train <= h
        if not left_to_write and not paused and written - version <= S:
            left_to_write = R
        working = left_to_write > 0 and not paused
        trainer_idle += not left_to_train
        engine_idle += not working and not (paused and not shared)
        tick += 1
        if working:
            left_to_write -= 1
            written += left_to_write == 0
        if left_to_train:
            left_to_train -= 1
            if not left_to_train:
                version += 1
                if version in (first, steps):
                    marks.append((tick, trainer_idle, engine_idle))
    (began, *before), (ended, *after) = marks
    seconds = (ended - began) / (steps - first)
    return seconds, *((b - a) / (ended - began) for a, b in zip(before, after))


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_that_of_a_pipeline(seed):
    rng = random.Random(seed)
    R, T, U = rng.randint(1, 12), rng.randint(1, 12), rng.randint(0, 6)
    h, S, shared = rng.randint(0, U), rng.randint(0, 4), rng.random() < 0.3
    times = StepTimes.with_update(R, T, update=U, pause=h, overlap=stages_overlap(not shared, S))
    seconds, trainer_idle, engine_idle = play(R, T, U, h, S, shared=shared)
    assert seconds == pytest.approx(times.seconds, rel=0.02)
    assert trainer_idle == pytest.approx(times.trainer_idle, abs=0.03)
    if times.overlap:
        assert engine_idle == pytest.approx(times.engine_idle, abs=0.03)
        assert (trainer_idle >= engine_idle) == (times.waiting == "trainer") or times.rollouts == times.training
    else:
        assert times.in_turn() == times and times.overlapped().seconds <= times.seconds


@pytest.mark.parametrize("seed", range(20))
def test_more_devices(seed):
    rng = random.Random(seed)
    R, T, engines, ranks = rng.uniform(1, 9), rng.uniform(1, 9), rng.randint(1, 8), rng.randint(1, 8)
    now = StepTimes(R, T, overlap=True)
    more = now.scaled(engines=(engines + 1) / engines, ranks=(ranks + 1) / ranks)
    assert more.seconds == pytest.approx(max(R * engines / (engines + 1), T * ranks / (ranks + 1)))
    assert more.speedup_over(now) == pytest.approx(now.seconds / more.seconds) and now.rate == 1 / now.seconds
    enough = [n for n in range(1, 33) if R * engines / n <= T]
    assert now.matching_engines(engines, 32) == min(enough, default=32)


def test_pools():
    assert StepTimes.from_rates(3, 5, overlap=True).rate == pytest.approx(3)
    assert StepTimes.from_rates(3, 5, overlap=True).trainer_idle == pytest.approx(0.4)
    assert StepTimes.from_rates(4, 4, overlap=False).rate == 2
    for r, t in ((1.0, 1.0), (1.0, 3.0), (0.2, 0.7)):
        G, a = 120, engine_share(r, t)
        apart = StepTimes.from_rates(a * G * r, (1 - a) * G * t, overlap=True)
        assert apart.trainer_idle == pytest.approx(0) and apart.engine_idle == pytest.approx(0)
        all_in_turn = StepTimes.from_rates(G * r, G * t, overlap=False)
        assert all_in_turn.rate == pytest.approx(G * r * t / (r + t))
        assert apart.rate == pytest.approx(all_in_turn.rate), "balanced async is perfect colocation"
        assert apart.rate == pytest.approx(2 * apart.in_turn().rate), "and twice a synchronous split"


def test_the_longest_answer_has_as_many_steps_as_it_may_be_old():
    assert [longest_answer_bound(12.0, S) for S in (0, 1, 3)] == [12.0, 6.0, 3.0]


def test_an_update_through_files_is_on_the_trainers_path():
    """The engines stand still for its commit alone, the trainer waits for all of it: as in the simulator."""
    from dataclasses import replace

    from rondel.planner.plan import make_plan
    from rondel.planner.workload import what_if
    from rondel.simulate import simulate, world_of

    words = ["model=7b", "hardware=h100", "gpus=16", "place=split", "trainers=2", "staleness=4", "output=2k", "mean=1k"]
    for sync in ("disk", "distributed"):
        setting = replace(what_if(words), sync=sync)
        told = simulate(world_of(setting, sigma=0.0), steps=6)["step_seconds"]
        assert make_plan(setting)["step_seconds"] == pytest.approx(told, rel=0.02)


def test_one_engine_over_all_devices_cannot_be_divided():
    from rondel.planner.plan import make_plan
    from rondel.planner.workload import what_if

    told = make_plan(what_if(["model=70b", "gpus=8", "tensor=8"]))["split"]
    assert (told["engines"], told["trainers"]) == (8, 0) and told["text"].startswith(
        "8 devices, all of them one engine"
    )
