"""driver/replay_buffer.py: groups that come back, each once, never older than
the limit (law 2), the same after a resume.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kits.runs import CARTPOLE, FLOW, PENDULUM_CHUNKS, balances, events, final, run, run_and_die, tiny
from kits.sweeps import covering
from rondel.assemble import replay
from rondel.assemble.components import build
from rondel.core.errors import ConfigError
from rondel.core.types import Group, Task
from rondel.driver.replay_buffer import ReplayBuffer
from rondel.runtime.journal import store


def steps_of(p: int, s: int, n: int):
    """(step, groups) of a run whose groups are 0 .. s versions old, in turn."""
    numbers = itertools.count()
    for step in range(1, n + 1):
        yield (
            step,
            [
                Group(k, Task(f"t{k}", "fake", {}), [], max(0, step - 1 - k % (s + 1)))
                for k in itertools.islice(numbers, p)
            ],
        )


CASES = [(p, s, n) for p, s, n in itertools.product((1, 4, 16), (1, 2, 5), (1, 3)) if n <= p]


@pytest.mark.parametrize("p,s,n,lag", [*((*case, case[1]) for case in CASES), (4, 0, 2, 3), (16, 2, 3, 9)])
def test_each_comes_back_once_and_within_its_bound(p, s, n, lag):
    """Law 2: never older than S, or than `lag` where that is beyond it; and no more is kept than comes back."""
    again, seen, trained, ages = ReplayBuffer(n, lag, seed=3), [], {}, []
    for step, groups in steps_of(p, s, 40):
        again.record_step(step, groups)
        trained |= {group.id: step for group in groups}
        for group in again.due_groups():
            ages.append(step - 1 - group.born)
            assert trained[group.id] < step and ages[-1] <= lag
            seen.append(group.id)
        assert sum(map(len, again.kept.values())) <= n * (lag + 1)
    assert len(seen) == len(set(seen)) and seen, "each at most once"
    room = sum(any(min(s, step - 1) - (step - 1 - g.born) > 0 for g in groups) for step, groups in steps_of(p, s, 40))
    assert len(seen) <= n * 40 and (p < 16 or len(seen) >= 0.3 * n * room)
    assert lag == s or (max(ages) == lag and sum(age > s for age in ages) > len(ages) / 3)


def test_whoever_comes_later_draws_the_same():
    whole, late, told = ReplayBuffer(3, 2, seed=1), ReplayBuffer(3, 2, seed=1), []
    for step, groups in steps_of(8, 2, 12):
        whole.record_step(step, groups)
        if step > 5:
            late.record_step(step, groups)
        told.append(([g.id for g in whole.due_groups()], [g.id for g in late.due_groups()] if step > 7 else None))
    assert any(a for a, _ in told) and all(a == b for a, b in told if b is not None)


@pytest.mark.slow
def test_a_run_trains_them_beside_its_own_and_replays_to_the_bit(tmp_path):
    run(
        tmp_path,
        loop__max_staleness=2,
        loop__replays=2,
        loop__warmup__steps=2,
        loop__steps=6,
        algo__correction={"kind": "importance"},
    )
    done = {e["step"]: e for e in events(tmp_path, "StepDone")}
    back = {e["step"]: e["groups"] for e in events(tmp_path, "Replayed")}
    assert back and min(back) > 3 and all(balances(e["ledger"]) for e in done.values())
    assert [e["ledger"]["trained"] for e in done.values()][-1] == 6 * 4, "the ledger counts a group once"
    last = max(back)
    again = replay(tmp_path, last)
    assert {n: again[n] for n in ("train/loss", "train/grad_norm", "train/tokens")} == {
        n: done[last]["metrics"][n] for n in ("train/loss", "train/grad_norm", "train/tokens")
    }


OLD = {"groups": 2, "max_lag": 4}
IMPORTANCE = {"kind": "importance"}
SCORED = {"loop__warmup__steps": 0, "task__reward": "kits.rewards:parity"}
KINDS = {  # where tokens, points, actions and blocks are drawn, and a row that weighs by who drew them
    "critic": {
        "algo": {"kind": "ppo", "group_size": 4, "correction": IMPORTANCE},
        "trainer__critic": {"lr": 1e-3},
        **SCORED,
    },
    "filtered": {"task__filters": ["signal"], "algo__correction": IMPORTANCE, "algo__kl": {"coef": 0.01}, **SCORED},
    "tokens": {"algo__correction": {"kind": "importance"}, "loop__warmup__steps": 0},
    "points": {"recipe": FLOW, "algo__correction": {"kind": "importance"}, "loop__warmup__steps": 0},
    "actions": {"recipe": CARTPOLE, "algo__correction": {"kind": "importance"}, "task__env__turns": 6},
    "chunks": {
        "recipe": PENDULUM_CHUNKS,
        "algo": {"kind": "dppo_tv", "group_size": 2},
        "trainer__critic": {},
        "task__env__turns": 6,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(KINDS, {"critic", "points", "actions"}, fast=["points"]))
def test_old_steps_are_trained_beyond_the_bound_of_fresh_ones(kind, tmp_path):
    """S = 0, and groups come back up to 4 versions old: with the log-probabilities that drew them, once each, not counted
    again (laws 1 and 2), and the same numbers from the stored rollouts (law 9)."""
    if kind in ("actions", "chunks"):
        pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")
    how = KINDS[kind] | {"loop__steps": 7, "loop__replays": OLD, "run__checkpoint__every": 6}
    run(tmp_path, **how)
    done = {e["step"]: e for e in events(tmp_path, "StepDone")}
    back = {e["step"]: e for e in events(tmp_path, "Replayed")}
    ids = [i for e in back.values() for i in e["groups"]]
    assert len(ids) == len(set(ids)) and 0 < max(e["oldest"] for e in back.values()) <= 4
    assert any(e["oldest"] > 1 for e in back.values())
    assert all(balances(e["ledger"]) for e in done.values()) and done[7]["ledger"]["trained"] == 7 * 4
    for step, e in done.items():
        metrics, lags = e["metrics"], {0, *([back[step]["oldest"]] if step in back else [])}
        assert {f"train/mismatch_k3_lag_{lag}" for lag in lags} <= metrics.keys() and metrics["train/grad_norm"] >= 0
        assert {row["trained_at"] - row["born"] for row in store.read_step(tmp_path, step)} == {0}
    last = max(back)
    assert kind != "critic" or done[last]["metrics"]["train/value_loss"] > 0
    assert kind != "filtered" or (done[last]["metrics"]["train/kl_ref"] > 0 and done[7]["ledger"]["filtered/unanimous"])
    again = replay(tmp_path, last)
    same = ("train/loss", "train/grad_norm", "train/tokens")
    assert {n: again[n] for n in same} == {n: done[last]["metrics"][n] for n in same}


def test_a_critics_clipped_row_is_refused_beyond_the_bound_of_fresh_ones(tmp_path):
    """ppo's ratio begins at the weights of the step, not at those that drew the token."""
    ppo = {"algo": {"kind": "ppo", "group_size": 4}, "trainer__critic": {}, "loop__replays": OLD}
    with pytest.raises(ConfigError, match=r"max_lag = 4 is beyond .* 'ppo' trains .* set algo.correction"):
        build(tiny(tmp_path, **ppo))


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run that has such steps among others
def test_a_run_that_was_killed_brings_back_the_same_old_steps(tmp_path):
    """Law 9: what is still to come back is read from the stored rollouts."""
    how = KINDS["points"] | {"loop__steps": 8, "loop__replays": OLD}
    run(tmp_path / "whole", **how)
    assert run_and_die(tmp_path / "cut", ("StepDone", 5), **how) == -9
    run(tmp_path / "cut", **how)
    ours, theirs = final(tmp_path / "cut"), final(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_it_needs_staleness_and_no_more_than_a_step_has(tmp_path):
    with pytest.raises(ConfigError, match="at least one version old"):
        tiny(tmp_path, loop__replays=2)
    with pytest.raises(ConfigError, match="more than a step has"):
        tiny(tmp_path, loop__replays=200, loop__max_staleness=1)
    with pytest.raises(ConfigError, match="max_lag has no effect"):
        tiny(tmp_path, loop__replays={"max_lag": 3})
    with pytest.raises(ConfigError, match=r"beyond loop.max_staleness = 0, and 'grpo' trains tokens of old weights"):
        build(tiny(tmp_path, loop__replays=OLD))
    with pytest.raises(ConfigError, match="would be counted twice"):
        build(tiny(tmp_path, recipe=FLOW, loop__replays=OLD, algo__kind="ddpo"))
