"""From measured runs to the planner's shares: times that the planner itself would predict
lead back to what it predicted them with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rondel.checks.calibration import LARGE, SMALL, PaceMedians, fit_hardware, job_of, measure_run, solve_pair
from rondel.planner import cost
from rondel.planner.hardware import DEVICES
from rondel.planner.workload import of_job

TRUE = replace(
    DEVICES["cpu"],
    overhead=0.001,
    calls=0.02,
    answer=0.002,
    row=0.0005,
    decode_efficiency=0.4,
    efficiency=0.6,
    stream=1.0,
)
BLANK = replace(TRUE, overhead=0.0, calls=0.0, answer=0.0, row=0.0, decode_efficiency=1.0, efficiency=1.0)


def as_predicted(model, **how):
    setting = of_job(job_of(model, 4, **how))
    setting = replace(setting, hardware=TRUE, prompt=1, mean=float(setting.output))
    generated, trained = cost.generation_time(setting).seconds, cost.train_seconds(setting)
    return setting, PaceMedians(generated, trained, setting.new_tokens, setting.packed_tokens)


def test_what_was_put_in_comes_out():
    runs = (
        as_predicted(SMALL, groups=8, new=48),
        as_predicted(SMALL, groups=32, new=8),
        as_predicted(LARGE, groups=8, new=32),
    )
    found = fit_hardware(BLANK, *runs)
    for name in ("overhead", "answer", "calls", "row", "efficiency", "decode_efficiency"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name


@pytest.mark.parametrize("x, y", [(2.0, 3.0), (0.0, 3.0), (2.0, 0.0)])
def test_two_unknowns(x, y):
    assert solve_pair((48, 64, 48 * x + 64 * y), (8, 256, 8 * x + 256 * y)) == pytest.approx((x, y))


def test_nothing_costs_less_than_nothing():
    for second in (0.1, 1000.0):
        assert min(solve_pair((48, 64, 10.0), (8, 256, second))) >= 0


@pytest.mark.slow
def test_a_run_says_how_long_its_texts_were(tmp_path):
    from kits.runs import tiny

    job = tiny(
        tmp_path,
        loop__warmup__steps=0,
        loop__steps=2,
        task__data__holdout=0,
        engine__sampling={"max_tokens": 3, "ignore_eos": True},
    )
    setting, paced = measure_run(job)
    assert (
        paced.new == 4 * 4 * 3 and setting.mean == 3 and paced.packed == pytest.approx(setting.packed_tokens, rel=0.25)
    )
    assert paced.generate > 0 and paced.train > 0
