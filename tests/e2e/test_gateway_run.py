"""Whole tiny runs whose environment is an agent with OpenAI's client, on the built-in engine."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kits import gateway
from kits.runs import check, run

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
HOW = {
    **{"loop__warmup__steps": 1, "loop__steps": 2, "run__checkpoint__every": 3, "loop__groups_per_step": 2},
    "algo__group_size": 4,
}


def sampled(row):
    """And not shown, in the supervised phase before."""
    return any(row["behavior_logprobs"])


def turns(row):
    """The policy's, by its mask."""
    return sum(now and not before for before, now in zip([False, *row["mask"]], row["mask"]))


def test_an_agent_is_trained_and_a_turn_computes_only_what_is_new(tmp_path):
    gateway.NOTED.clear()
    card = run(tmp_path, task__env={"kind": "gateway", "agent": "kits.gateway:three_turns"}, **HOW)
    # masks, versions, lag, and that the trainer finds the logprobs that were recorded
    rows = check(tmp_path, staleness=0, total=3)
    mine = list(filter(sampled, rows))
    assert len(mine) == 2 * 8 and all(turns(row) == 3 and row["mask"][-1] for row in mine)
    assert {row["reward"] for row in mine} <= {0.0, 1 / 3, 2 / 3, 1.0} and card
    assert len(gateway.NOTED) >= 2 * 8
    for episode in gateway.NOTED:
        for before, now in pairwise(episode):
            assert now[1] >= before[0] + before[2] - 1, "all but the newest token of the turn before is in the cache"
            assert now[0] - now[1] <= len("<eos>") + len("<user> again <assistant>")


def test_the_example_is_trained(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    run(tmp_path, task__env={"kind": "gateway", "agent": "my_agent:solve"}, **HOW)
    mine = list(filter(sampled, check(tmp_path, staleness=0, total=3)))
    assert {turns(row) for row in mine} <= {1, 2} and {row["reward"] for row in mine} <= {0.0, 0.5, 1.0}
    assert all(turns(row) == 1 for row in mine if row["reward"] == 1.0)
    assert len((EXAMPLES / "my_agent.py").read_text().splitlines()) <= 30


def test_branches_of_an_episode_are_trained_with_its_score(tmp_path):
    """A helper, and a second answer from the same place: what the walks share is the same tokens
    with the same record.
    """
    run(tmp_path, task__env={"kind": "gateway", "agent": "kits.gateway:compacting"}, **HOW)
    mine = list(filter(sampled, check(tmp_path, staleness=0, total=3)))
    assert len(mine) == 2 * 8 * 3
    for group in {row["group"] for row in mine}:
        rows = [row for row in mine if row["group"] == group]
        roots = [row for row in rows if row["parent"] is None]
        assert len(roots) == 4 and sorted(turns(row) for row in rows) == [1] * 4 + [2] * 8
        for root in roots:
            branches = [row for row in rows if row["parent"] == root["sample"]]
            (other,) = (row for row in branches if turns(row) == 2)
            n = 1 + next(i for i, (a, b) in enumerate(pairwise(root["mask"])) if a and not b)
            assert len(branches) == 2 and {row["reward"] for row in branches} == {root["reward"]}
            assert all(
                root[what][:n] == other[what][:n] for what in ("tokens", "mask", "behavior_logprobs", "versions")
            )
            assert root["tokens"] != other["tokens"]
