"""driver/replay_buffer.py: groups that come back, each once, never older than
the limit (law 2), the same after a resume.
"""

from __future__ import annotations

import itertools

import pytest

from kits.runs import balances, events, run, tiny
from rondel.assemble import replay
from rondel.core.errors import ConfigError
from rondel.core.types import Group, Task
from rondel.driver.replay_buffer import ReplayBuffer


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


@pytest.mark.parametrize("p,s,n", [(p, s, n) for p, s, n in itertools.product((1, 4, 16), (1, 2, 5), (1, 3)) if n <= p])
def test_each_comes_back_once_and_within_its_bound(p, s, n):
    again, seen, trained = ReplayBuffer(n, s, seed=3), [], {}
    for step, groups in steps_of(p, s, 40):
        again.record_step(step, groups)
        trained |= {group.id: step for group in groups}
        for group in again.due_groups():
            assert trained[group.id] < step and step - 1 - group.born <= s
            seen.append(group.id)
    assert len(seen) == len(set(seen)) and seen, "each at most once"
    room = sum(any(min(s, step - 1) - (step - 1 - g.born) > 0 for g in groups) for step, groups in steps_of(p, s, 40))
    assert len(seen) <= n * 40 and (p < 16 or len(seen) >= 0.3 * n * room)


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


def test_it_needs_staleness_and_no_more_than_a_step_has(tmp_path):
    with pytest.raises(ConfigError, match="at least one version old"):
        tiny(tmp_path, loop__replays=2)
    with pytest.raises(ConfigError, match="more than a step has"):
        tiny(tmp_path, loop__replays=200, loop__max_staleness=1)
