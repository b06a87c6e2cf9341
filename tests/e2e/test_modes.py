"""The modes on two cores: the loop is the same, three values differ. Each run completes, balances,
and keeps its lag.
"""

from __future__ import annotations

import pytest

from kits.runs import check, events, final, run, tiny
from kits.sweeps import covering
from rondel.assemble import train
from rondel.core.events import Evaluated, subscribe
from rondel.runtime.journal import store

pytestmark = pytest.mark.slow

TIS = {"algo__correction": {"kind": "importance"}}
LONG = {
    "engine__sampling": {"max_tokens": 16},
    "engine__max_running": 10,
    "loop__warmup__steps": 0,
    "loop__steps": 4,
}  # some run while others wait
SHORT = {"loop__warmup__steps": 1, "loop__steps": 3}
MODES = {
    "synchronous": {},
    "one step stale, hold": {"loop__max_staleness": 1, **TIS, **LONG},
    "one step stale, drain": {"loop__max_staleness": 1, "loop__in_flight": "drain", **TIS, **LONG},
    "two steps stale": {"loop__max_staleness": 2, "loop__window": 1, **TIS, **LONG},
    "two updates": {"loop__updates_per_step": 2},
    "stale and two updates": {"loop__max_staleness": 1, "loop__updates_per_step": 2, **TIS},
}
ROWS = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "ppo", "reinforce_pp"]


@pytest.mark.parametrize("name", covering(MODES, MODES.keys() - {"two updates"}))  # two updates: stale, too
def test_a_mode_completes_and_keeps_its_lag(tmp_path, name):
    changes = SHORT | MODES[name]
    staleness = changes.get("loop__max_staleness", 0)
    run(tmp_path, **changes)
    warm, steps = changes["loop__warmup__steps"], changes["loop__steps"]
    rows = check(tmp_path, staleness=staleness, total=warm + steps)
    rl = [e for e in events(tmp_path, "GroupsTaken") if e["step"] > warm]
    assert [len(e["numbers"]) for e in rl] == [4] * steps
    lags = [e["version"] - b for e in rl for b in e["born"]]
    assert max(lags) == staleness  # a bound that is never reached would be a hidden constant
    spans = [r for r in rows if len({v for v in r["versions"] if v >= 0}) > 1]
    if "hold" in name:
        assert spans, "no sample was written by two versions"
    if staleness == 0 or "drain" in name:
        assert not spans
    metrics = [e["metrics"] for e in events(tmp_path, "StepDone") if e["step"] > warm]
    assert all(m["train/gap_max"] < 1e-4 for m in metrics) or staleness > 0
    if "updates" in name:
        # the second update has moved away from the anchor
        assert any(m["train/ratio_max_deviation"] > 1e-4 for m in metrics)
    else:
        assert all(m["train/ratio_max_deviation"] == 0 for m in metrics)


# one of each kind of advantage; ppo and reinforce_pp are in the next test, grpo in those above, dr_grpo is rloo but for a
# factor, dapo grpo but for filters and overlong shaping, which tests/units and law 3 have
@pytest.mark.parametrize("kind", covering(ROWS, {"rloo", "reinforce"}))
def test_a_row_trains_for_a_few_steps(tmp_path, kind):
    run(tmp_path, algo__kind=kind, **SHORT, task__reward="kits.rewards:parity")
    rows = [r for r in check(tmp_path, staleness=0, total=4) if r["trained_at"] >= 1]
    roots = [e["root"] for e in events(tmp_path, "Synced")]
    assert len(set(roots)) > 2
    rewards = {r["reward"] for r in rows}
    assert rewards == {0.0, 1.0}
    by_group: dict[int, list[dict]] = {}
    for r in rows:
        by_group.setdefault(r["group"] + 10**6 * r["trained_at"], []).append(r)
    for group in by_group.values():
        advantages = [next(a for a, m in zip(r["advantages"], r["mask"]) if m) for r in group]
        if kind in ("ppo", "reinforce_pp"):  # whitened over the step's tokens
            continue
        if kind == "reinforce":
            assert advantages == [r["reward"] for r in group]
        elif kind != "dapo":  # its overlong shaping changes the rewards
            assert sum(advantages) == pytest.approx(0.0, abs=1e-5)
            assert all(
                (a > 0) == (r["reward"] > sum(x["reward"] for x in group) / 4) for a, r in zip(advantages, group)
            )


@pytest.mark.parametrize("kind", ["ppo", "reinforce_pp"])
def test_rows_that_look_along_time_are_whitened_over_the_step(tmp_path, kind):
    run(
        tmp_path,
        algo__kind=kind,
        algo__group_size=2,
        loop__warmup__steps=1,
        loop__steps=2,
        loop__updates_per_step=2,
        task__reward="kits.rewards:parity",
    )
    for step in (2, 3):
        values = [a for r in store.read_step(tmp_path, step) for a, m in zip(r["advantages"], r["mask"]) if m]
        assert sum(values) == pytest.approx(0.0, abs=1e-4) and sum(a * a for a in values) == pytest.approx(
            len(values) - 1, rel=1e-4
        )


def test_the_two_phases_are_one_run(tmp_path):
    """The supervised phase learns, and RL goes on with its weights, optimizer and version.
    Every key that is set has been read by the end.
    """
    job = tiny(
        tmp_path,
        loop__warmup__steps=4,
        loop__steps=4,
        loop__max_staleness=1,
        loop__window=1,
        loop__max_refills=9,
        task__eval__every=3,
        task__eval__n=4,
    )
    train(job, quiet=True)
    assert job.unread_keys() == []
    done = events(tmp_path, "StepDone")
    losses = [e["metrics"]["train/loss"] for e in done[:4]]
    assert losses[-1] < losses[0]
    assert [e["metrics"]["train/lr"] for e in done] == [3e-3] * 4 + [1e-3] * 4
    assert int(final(tmp_path)["optimizer/numbers"][0]) == 8
    steps = {float(t) for name, t in final(tmp_path).items() if name.startswith("optimizer/step.")}
    assert len(steps) == 1 and steps.pop() <= 8


def test_rewards_of_any_size_are_evaluated(tmp_path):
    """Two points a task, or minus one: the mean is reported with an interval of numbers, not of a share."""
    seen: list[Evaluated] = []
    stop = subscribe(lambda event: seen.append(event) if isinstance(event, Evaluated) else None)
    try:
        run(tmp_path, task__reward="kits.rewards:plus_or_minus", loop__warmup__steps=0, loop__steps=1)
    finally:
        stop()
    assert seen and all(e.low <= e.score <= e.high and e.low < 0 for e in seen)


@pytest.mark.parametrize(
    ("algo", "warned"),
    [
        # reads the behavior's logprobs, and corrects nothing
        ({"algo__kl": {"kind": "k1", "coef": 0.1, "where": "reward"}}, True),
        ({"algo__kind": "sft"}, False),
        ({"algo__kind": "dppo_tv"}, False),
        (TIS, False),
    ],
)
def test_stale_tokens_without_a_correction_are_said_aloud(tmp_path, algo, warned):
    run(tmp_path, loop__max_staleness=1, loop__warmup__steps=0, loop__steps=1, **algo)
    assert any("without a correction" in e["message"] for e in events(tmp_path, "Warned")) is warned
