"""Tasksets and harnesses of verifiers 0.4, unchanged: tokens as drawn, the task's rewards, and a whole tiny run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kits.chat import chat
from kits.gateway import Policy, recorded, runs, tok
from kits.runs import check, run

pytest.importorskip(
    "verifiers.v1.utils.loaders", reason="verifiers 0.4 is not installed: pip install 'verifiers>=0.4,<0.5'"
)
from rondel.core.errors import ConfigError, EnvError
from rondel.generate.envs.gateway.env import Gateway
from rondel.generate.envs.sources import load_tasks
from rondel.generate.envs.verifiers import agent_of_verifiers

NAME = "verifiers_tasksets"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """verifiers imports a taskset by its id, in which no dot may be: as if kits/verifiers_tasksets.py were installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[1] / "kits")])


def play(*says: str, asked: str = "3+1=", **args):
    data = {"kind": "verifiers", "name": NAME, "args": args}
    task = next(t for t in load_tasks(data, env="verifiers").train if t.data["prompt"] == asked)
    policy = Policy(*says)
    found = asyncio.run(
        Gateway(agent_of_verifiers(data)).run(task, chat(tok(), policy, max_tokens=200, max_context=8192))
    )
    recorded(found, policy)
    return found, [tok().decode(r.tokens) for r in policy.requests]


def test_its_tasks_are_tasks():
    tasks = load_tasks(
        {"kind": "verifiers", "name": NAME, "args": {"taskset": {"n": 12}}, "holdout": 4}, env="verifiers"
    )
    assert len(tasks.train) + len(tasks.held_out) == 12 and tasks.train[0].data["example"]["task"]["answer"]


@pytest.mark.parametrize(("said", "worth"), [("4", 1 + 0.5 / 2), ("5", 0.5 / 2), ("44", 0.5 / 3)])
def test_the_tasks_rewards_are_the_score(said, worth):
    found, asked = play(said)
    assert found.score.value == pytest.approx(worth) and found.score.parts["right"] == float(said == "4")
    assert found.score.parts["short"] == pytest.approx(0.5 / (1 + len(said))) and asked[0].count("3+1=") == 1


def test_several_turns_are_one_conversation():
    found, asked = play("5", "4", agent={"harness": {"id": NAME, "turns": 2}})
    assert runs(found) == 2 and found.score.parts["right"] == 1.0 and asked[1].startswith(asked[0])


def test_a_reward_that_breaks_is_a_fault_and_no_0():
    with pytest.raises(EnvError, match=r"TaskError.*a rubric that breaks"):
        play("9", asked="9+0=")


def test_a_run(tmp_path):
    data = {"kind": "verifiers", "name": NAME, "args": {"taskset": {"n": 9}}, "holdout": 2}
    how = {"loop__warmup__steps": 0, "loop__steps": 2, "run__checkpoint__every": 2}
    run(tmp_path, task__env="verifiers", task__data=data, **how)
    rows = check(tmp_path, staleness=0, total=2)
    assert len(rows) == 2 * 16 and all(0 < row["reward"] <= 1.5 and row["mask"][-1] for row in rows if any(row["mask"]))


def test_what_is_no_taskset_is_refused():
    def refused(match: str, name: str = NAME, **args) -> None:
        with pytest.raises(ConfigError, match=match):
            agent_of_verifiers({"kind": "verifiers", "name": name, "args": args})

    refused("the id or the module of a package", name=f"{NAME}:Sums")
    refused("not found", name="nowhere_at_all")
    refused("carries out what the policy writes: say where", agent={"harness": {"id": "bash"}})
    refused("nn", taskset={"nn": 3})
    with pytest.raises(ConfigError, match="has no splits"):
        load_tasks({"kind": "verifiers", "name": NAME, "eval_split": "eval"}, env="verifiers")
