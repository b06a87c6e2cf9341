"""Trainer and engines in turns on several devices: a rank and an engine in each process."""

from __future__ import annotations

import pytest

from kits.runs import check, events, run, tiny
from rondel.core.errors import ConfigError

pytestmark = pytest.mark.slow

SHARED = {"place__kind": "shared", "place__ranks": 2}
SHORT = {"loop__warmup__steps": 1, "loop__steps": 2}


def test_ranks_and_engines_on_the_same_devices_learn_what_one_device_learns(tmp_path):
    run(tmp_path / "one", **SHORT)
    run(tmp_path / "two", **SHORT, **SHARED)
    check(tmp_path / "two", staleness=0, total=3)
    one, two = (events(tmp_path / name, "StepDone") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert b["metrics"]["train/loss"] == pytest.approx(a["metrics"]["train/loss"], rel=1e-4)
    assert all(e["probe_gap"] < 1e-5 for e in events(tmp_path / "two", "Synced"))
    assert {e["worker"] for e in events(tmp_path / "two", "WorkerTime")} == {
        "trainer-0",
        "engine-0",
        "trainer-1",
        "engine-1",
    }
    assert "a rank of the trainer and an engine" in (tmp_path / "two" / "card.json").read_text()
    engines = [path.name for path in (tmp_path / "two" / "wal").iterdir()]
    assert sorted(engines) == ["engine-0", "engine-1"]


def test_a_mesh_on_shared_devices_resumes_and_waits_for_its_engines(tmp_path):
    """Two ranks that share every matrix, stopped and continued; one step stale, and a delivery beside the next step would
    let an engine go on while its device trains.
    """
    stale = {"loop__max_staleness": 1, "algo__correction": {"kind": "importance"}}
    how = {"place__kind": "shared", "place__mesh": {"tp": 2}, "loop__warmup__steps": 0, **stale}
    card = run(tmp_path, loop__steps=1, **how)
    run(tmp_path, loop__steps=3, **how)
    check(tmp_path, staleness=1, total=3)
    assert card["facts"]["resolved"]["weight_delivery"] == "the trainer waits (engines are on its devices)"


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"place__engines": 2}, "there is one engine a rank"),
        ({"place__cluster": "ray"}, "shared devices are on this machine"),
        ({"trainer__memory": {"offload": True}}, "the shards of several ranks stay on their devices"),
    ],
)
def test_what_shared_devices_do_not_have(tmp_path, changes, fault):
    with pytest.raises(ConfigError, match=fault):
        run(tmp_path, **SHARED, **changes)


def test_one_rank_is_still_one_process(tmp_path):
    assert tiny(tmp_path).place.one_module and tiny(tmp_path).place.cluster == "local"
    assert not tiny(tmp_path, **SHARED).place.one_module and tiny(tmp_path, **SHARED).place.cluster == "process"
