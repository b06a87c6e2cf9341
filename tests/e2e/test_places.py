"""Where engine and trainer live changes no result that it must not change: one test text for every placement."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from kits.local_ray import local_ray
from kits.runs import PLACES, check, events, run, tiny
from kits.sweeps import covering
from kits.transports import Broken
from rondel.assemble import deployment, train
from rondel.core.errors import ConfigError
from rondel.core.events import Event, GroupFinished, subscribe

pytestmark = pytest.mark.slow

TIS = {"algo__correction": {"kind": "importance"}}
LONG = {"engine__sampling": {"max_tokens": 16}, "engine__max_running": 10, "loop__warmup__steps": 0, "loop__steps": 4}
MODES = {
    "synchronous": {"loop__warmup__steps": 1, "loop__steps": 2},
    "one step stale, drain": {"loop__max_staleness": 1, "loop__in_flight": "drain", **TIS, **LONG},
    "stale, hold": {"loop__max_staleness": 2, **TIS, **LONG},
    "stale, abort": {"loop__max_staleness": 1, "loop__in_flight": "abort", **TIS, **LONG},
}


EVERYWHERE = {  # every place, and a mode over the wire; what is synchronous there is in test_chaos.py, what is aborted there on Ray below, what
    # is shared in test_modes.py, drained, too, and what is stale on two devices is repeated bit for bit in law 9: drained, aborted, held
    ("shared", "stale, abort"),
    ("two devices", "synchronous"),
    ("processes", "stale, hold"),
}


@pytest.mark.parametrize(("place", "mode"), covering(product(PLACES, MODES), EVERYWHERE))
def test_every_mode_runs_everywhere(tmp_path, place, mode):
    changes = MODES[mode]
    run(tmp_path, **changes, **PLACES[place])
    warm, number = changes.get("loop__warmup__steps", 3), changes.get("loop__steps", 8)
    staleness = changes.get("loop__max_staleness", 0)
    rows = check(tmp_path, staleness=staleness, total=warm + number)
    assert all(len(row["tokens"]) == len(row["versions"]) for row in rows)
    synced = events(tmp_path, "Synced")
    assert len({e["root"] for e in synced}) > 2 and all(e["probe_gap"] < 1e-3 for e in synced)
    metrics = [e["metrics"] for e in events(tmp_path, "StepDone") if e["step"] > warm]
    assert all(m["train/gap_max"] < 1e-4 for m in metrics) or staleness


# delta: to an engine that is killed in test_chaos.py; distributed: where shared memory fails, below, and on Ray
@pytest.mark.parametrize("kind", covering(["disk", "delta", "distributed"], ["disk"]))
def test_weights_go_by_every_transport(tmp_path, kind):
    run(tmp_path, place__kind="split", sync__kind=kind, loop__warmup__steps=2, loop__steps=1)
    assert f"{kind} (set)" in json.loads((tmp_path / "card.json").read_text())["facts"]["resolved"]["sync.kind"]
    assert len({e["root"] for e in events(tmp_path, "Synced")}) > 2


def test_auto_takes_the_fastest_of_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "WORTH", 0)
    run(tmp_path, place__kind="split", loop__steps=1, loop__warmup__steps=0)
    told = json.loads((tmp_path / "card.json").read_text())["facts"]["resolved"]["sync.kind"]
    rates = {kind: float(rate) for kind, rate in re.findall(r"(\w+) ([\d.]+) GB/s", told)}
    assert rates.keys() == {"ipc", "distributed", "disk"} and told.startswith(max(rates, key=rates.get)), told
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_whose_shared_memory_fails_goes_on_another_way(tmp_path, monkeypatch, staleness):
    """The engine cannot read any more after some updates, with and without a delivery beside a step."""
    plain = deployment.DeploymentPlan.new_transports

    def with_broken_memory(plan, *within):
        return plain(plan, *within) | {"ipc": Broken(receives=2)}

    monkeypatch.setattr(deployment.DeploymentPlan, "new_transports", with_broken_memory)
    stale = {"loop__max_staleness": staleness, **TIS} if staleness else {}
    run(tmp_path, place__kind="split", loop__steps=4, loop__warmup__steps=0, **stale)
    check(tmp_path, staleness=staleness, total=4)
    said = [e["message"] for e in events(tmp_path, "Warned") if "weights cannot travel by ipc" in e["message"]]
    assert len(said) == 1 and "from now on they go by distributed" in said[0]
    served = [e["version"] for e in events(tmp_path, "Synced")]
    assert served == sorted(served) and served[-1] == 4 and len(served) >= 4


@pytest.mark.sweep  # runs on meshes end where one rank ends in test_mesh_runs.py, steps on two ranks in test_ranks.py
def test_two_ranks_train_what_one_does(tmp_path):
    run(tmp_path / "one", place__kind="split", loop__steps=4)
    run(tmp_path / "two", place__kind="split", place__ranks=2, loop__steps=4)
    check(tmp_path / "two", staleness=0, total=7)
    one, two = (events(tmp_path / name, "StepDone") for name in ("one", "two"))
    for a, b in zip(one[:4], two[:4]):  # later a token may fall otherwise
        assert b["metrics"]["train/loss"] == pytest.approx(a["metrics"]["train/loss"], rel=1e-3)


def test_a_split_run_resumes(tmp_path):
    """Stopped after 2 steps and continued, on other ranks and in another placement."""
    run(tmp_path, place__kind="split", loop__warmup__steps=1, loop__steps=1)
    with pytest.raises(ConfigError, match=r"place\.kind"):
        run(tmp_path, loop__warmup__steps=1, loop__steps=2)
    run(tmp_path, place__kind="split", loop__warmup__steps=1, loop__steps=2)
    assert [e["step"] for e in events(tmp_path, "StepDone")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"place__cluster": "process"}, 'needs kind = "split"'),
        ({"place__kind": "split", "place__cluster": "local", "place__ranks": 2}, "more than one engine or rank needs"),
        ({"place__engines": 2}, "one engine a rank"),
        ({"sync__kind": "ipc"}, "one module"),
        ({"place__kind": "split", "sync__kind": "tensor"}, "are apart"),
    ],
)
def test_places_that_cannot_be_are_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, **changes)


def test_a_mode_runs_on_two_ranks_on_ray_and_a_killed_engine_comes_back(tmp_path):
    """Killed while answers are written, with an update on its way or not. That of test_law_09_resume waits for all actors."""
    parts, left = [], [6]

    def strike(event: Event) -> None:
        if isinstance(event, GroupFinished):
            left[0] -= 1
            if not left[0]:
                parts[0].placed.remotes["engine-0"]._worker._kill_actor()  # and says nothing to the worker's proxy

    changes = MODES["stale, abort"] | {"loop__steps": 8}  # long enough for an engine that comes back
    changes |= {"place__kind": "split", "place__cluster": "ray", "place__ranks": 2}
    stop = subscribe(strike)
    try:
        with local_ray(4):
            train(tiny(tmp_path, **changes, place__patience=12.0), quiet=True, built=parts.append)
    finally:
        stop()
    check(tmp_path, staleness=1, total=8)
    assert (
        "distributed (trainer and engines are on different machines"
        in json.loads((tmp_path / "card.json").read_text())["facts"]["resolved"]["sync.kind"]
    )
    assert any(
        "worker engine-0 ended" in e["message"] and "started again (1 of" in e["message"]
        for e in events(tmp_path, "Warned")
    )


def test_torchrun_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="was not started by torchrun"):
        run(tmp_path, place__kind="split", place__cluster="torchrun")
