"""Concurrency that finds itself: against an engine with a knee, and one without room."""

from __future__ import annotations

import random

import pytest

from rondel.generate.engine.concurrency import WINDOW, ConcurrencyController


def driven(control, knee, *, room=10**9, windows=400, noise=0.02, felt=lambda window: True, seed=0):
    """An engine that is as fast as min(n, knee) allows, and retracts where n > room. -> the limit after each window."""
    draw, limits = random.Random(seed), []
    for window in range(windows):
        for _ in range(WINDOW):
            n = control.limit
            seconds = 0.01 * max(1.0, n / knee) * draw.gauss(1.0, noise)
            control.record_answer(n, seconds, felt=felt(window), pressed=n > room)
            assert 1 <= control.limit <= control.most
        limits.append(control.limit)
    return limits


@pytest.mark.parametrize("knee", [8, 24, 60, 100])
@pytest.mark.parametrize("seed", range(5))
def test_it_comes_to_the_knee_and_stays_in_a_band(knee, seed):
    control = ConcurrencyController(most=128)
    limits = driven(control, knee, seed=seed)
    settled, step = limits[150:], control.step
    assert max(settled) - min(settled) <= 3 * step, "steady"
    if knee > 32:  # it begins at 32, and has no reason to leave it downwards
        assert knee - 2 * step <= min(settled) and max(settled) <= knee + 4 * step
    else:
        assert min(settled) >= 32


def test_without_a_knee_it_goes_to_the_most():
    assert driven(ConcurrencyController(most=64), 10**9)[-1] == 64


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("best", [1, 5, 12])
def test_it_goes_down_to_where_fewer_are_faster(best, seed):
    """Beyond the best number the rate falls as 1 / sqrt(n): it began at a quarter of the most, and never went below."""
    control, draw = ConcurrencyController(most=64), random.Random(seed)
    limits = []
    for _ in range(120):
        for _ in range(WINDOW):
            n = control.limit
            rate = 100 * min(n, best) / max(1.0, n / best) ** 0.5
            control.record_answer(n, n / rate * draw.gauss(1.0, 0.02), felt=True)
        limits.append(control.limit)
    assert all(abs(limit - best) <= 2 * control.step for limit in limits[40:]), limits
    assert best > 1 or sum(limit == 1 for limit in limits[40:]) > 60


@pytest.mark.parametrize("room", [3, 20, 50])
def test_it_halves_where_there_is_no_room_and_comes_back(room):
    limits = driven(ConcurrencyController(most=128), 10**9, room=room)
    settled = limits[100:]
    assert min(settled) >= room // 2 and max(settled) <= room + 8


def test_where_nobody_waits_nothing_is_learned():
    control = ConcurrencyController(most=64)
    assert (
        set(driven(control, 10**9, windows=20, felt=lambda window: False)) == {16} and control.settled_limit() is None
    )


def test_it_says_once_what_it_found_and_the_gain():
    control, said = ConcurrencyController(most=128, limit=8), []
    for _ in range(60):
        driven(control, 40, windows=1, noise=0.0)
        if found := control.settled_limit():
            said.append(found)
    assert len(said) == 1
    message, gain = said[0]
    assert message.startswith("engine.concurrency: 40 of at most 128 requests together") and gain == pytest.approx(
        40 / 8, rel=0.01
    )
