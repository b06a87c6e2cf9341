"""Law 13, time: the phases on the learner's critical path add up to the step within 2 %. Every worker's time account
sums to 100 %.
"""

import json
import time

import pytest

from kits.runs import events, run
from rondel.core.clocks import TimeAccount
from rondel.core.events import WorkerTime, subscribe

pytestmark = pytest.mark.slow

PLACES = {
    "shared": {},
    "split": {"place__kind": "split", "loop__max_staleness": 1, "algo__correction__kind": "importance"},
}


def test_an_account_leaves_no_moment_out():
    heard = []
    end = subscribe(heard.append)
    before = time.perf_counter()
    account = TimeAccount("engine")
    inside = time.perf_counter()
    for kind in ("generate", "held", "generate", "idle"):
        account.switch_to(kind)
        account.switch_to(kind)  # the same is no turn
        time.sleep(0.002)
    last = time.perf_counter()
    account.counts["tokens"] += 7
    account.report_time()
    after = time.perf_counter()
    account.report_time()
    end()
    first, second = heard
    assert (
        isinstance(first, WorkerTime)
        and first.seconds.keys() == {"idle", "generate", "held"}
        and first.counts == {"tokens": 7}
    )
    assert [kind for kind, _ in first.laps] == ["idle", "generate", "held", "generate", "idle"]
    assert sum(s for _, s in first.laps) == pytest.approx(sum(first.seconds.values()), abs=1e-5)
    assert last - inside <= sum(first.seconds.values()) <= after - before
    assert second.counts == {} and second.seconds.keys() == {"idle"}, "what was told is told once"


@pytest.mark.parametrize("place", PLACES)
def test_phases_and_accounts_of_a_run(tmp_path, place):
    run(tmp_path, loop__warmup__steps=2, loop__steps=4, **PLACES[place])
    for done in events(tmp_path, "StepDone"):
        phases = {name: s for name, s in done["seconds"].items() if name != "step"}
        assert min(phases.values()) >= 0 and sum(phases.values()) == pytest.approx(done["seconds"]["step"], rel=0.02)
    told: dict[str, list] = {}
    for event in events(tmp_path, "WorkerTime"):
        told.setdefault(event["worker"], []).append(event)
    assert told.keys() == ({"engine", "trainer"} if place == "shared" else {"engine-0", "trainer-0"})
    for accounts in told.values():
        passed = accounts[-1]["until"] - accounts[0]["until"]  # the journal's clock has an event's way in it
        assert sum(sum(e["seconds"].values()) for e in accounts[1:]) == pytest.approx(passed, rel=0.02, abs=0.02)
        assert all(e["until"] <= e["t"] + 0.01 for e in accounts)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["workers"].keys() == {"controller", *told} and all(
        sum(w.values()) == pytest.approx(1) for w in card["workers"].values()
    )
    assert "| " + min(told) + " | " in (tmp_path / "card.md").read_text()
    kinds = {name: set().union(*(e["seconds"] for e in accounts)) for name, accounts in told.items()}
    engine, trainer = sorted(kinds)
    assert {"generate", "held", "idle", "score"} <= kinds[engine] and {"step", "idle", "publish"} <= kinds[trainer]
    # the two steps of warmup show
    wrote = sum(sum(e["lengths"]) for e in events(tmp_path, "GroupFinished") if e["number"] >= 16)
    assert sum(e["counts"].get("tokens", 0) for e in told[engine]) >= 0.5 * wrote, (
        "only the tail after the last update is not told"
    )
    assert all(e["counts"]["requests"] <= e["counts"]["room"] for e in told[engine] if e["counts"])
