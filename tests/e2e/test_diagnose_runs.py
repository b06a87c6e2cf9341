"""Faults injected into real tiny runs are named by `rondel diagnose`; a run without
one has no finding that is an error.
"""

import pytest

from kits.runs import run, run_and_die
from kits.sweeps import covering
from rondel.runtime.telemetry.diagnose import diagnose

pytestmark = pytest.mark.slow

BASE = {"loop__warmup__steps": 0, "loop__steps": 5, "task__reward": "kits.rewards:parity", "task__eval__every": 0}
CUT = "truncation"  # at 4 tokens nearly every answer is, in all of these: a true finding
FAULTS = {
    "lr = 0": (dict(trainer__lr=0.0), "weights_still"),
    "the reward knows no difference": (dict(task__reward="kits.rewards:constant"), "no_signal"),
    "the tasks are too hard": (dict(task__reward="number"), "no_signal"),
    "the reward breaks on half of the answers": (dict(task__reward="kits.rewards:broken"), "failing_reward"),
    "length is paid": (
        dict(
            task__reward="kits.rewards:long", loop__groups_per_step=8, engine__sampling__max_tokens=24, loop__steps=10
        ),
        "length_bias",
    ),
    "every answer is cut": (dict(engine__sampling__max_tokens=2), CUT),
    "stale, and not corrected": (
        dict(place__kind="split", place__cluster="local", loop__max_staleness=3, loop__window=1, loop__steps=14),
        "lag_uncorrected",
    ),
    "a learning rate that breaks the policy": (dict(trainer__lr=0.1, loop__steps=10), "kl_runaway"),
}


# the second kind of no_signal is the first one's journal; lr = 0 writes what `rondel check` compares; the two that need more
# steps are found among written ones in tests/units/test_diagnose.py
SLOW = {"lr = 0", "the tasks are too hard", "length is paid", "a learning rate that breaks the policy"}


@pytest.mark.parametrize("fault", covering(FAULTS, FAULTS.keys() - SLOW))
def test_a_fault_in_a_real_run(tmp_path, fault):
    changes, expected = FAULTS[fault]
    run(tmp_path, **BASE | changes)
    names = [f.name for f in diagnose(tmp_path)]
    print(fault, names)
    assert expected in names
    assert {f.name for f in diagnose(tmp_path) if f.severity == "error"} <= {expected}, "one fault, one error"


SPLIT = {"place__kind": "split", "loop__max_staleness": 1, "algo__correction__kind": "importance"}


@pytest.mark.parametrize(
    "place",
    [pytest.param({}, marks=pytest.mark.sweep), SPLIT],  # the plain one, killed, is next
)
def test_a_run_without_one(tmp_path, place):
    run(tmp_path, **BASE | place)
    assert [f for f in diagnose(tmp_path) if f.severity == "error"] == []


def test_a_run_that_was_killed(tmp_path):
    assert run_and_die(tmp_path, ("StepDone", 4), **BASE) == -9
    assert diagnose(tmp_path)[0].name == "died"
    run(tmp_path, **BASE)
    assert [f for f in diagnose(tmp_path) if f.severity == "error"] == [], "it went on"


def test_a_run_that_ended_by_an_error(tmp_path):
    with pytest.raises(Exception, match="max_failures"):
        run(tmp_path, **BASE | {"task__reward": {"kind": "kits.rewards:broken", "max_failures": 0.1}})
    found = diagnose(tmp_path)
    assert found[0].name == "broke" and "RewardError" in found[0].evidence and "an odd answer" in found[0].evidence
