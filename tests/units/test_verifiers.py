"""Environments of the verifiers package, unchanged: tokens as drawn, the rubric's score, and a whole tiny run."""

from __future__ import annotations

import asyncio

import pytest

from kits.chat import chat
from kits.gateway import Policy, call, recorded, runs, tok
from kits.runs import check, run

pytest.importorskip("verifiers.legacy", reason="verifiers 0.3 is not installed: pip install 'verifiers>=0.3,<0.4'")
from rondel.core.errors import ConfigError, EnvError
from rondel.generate.envs.gateway.env import Gateway
from rondel.generate.envs.sources import load_tasks
from rondel.generate.envs.verifiers import agent_of_verifiers


def play(name: str, *says: str):
    data = {"kind": "verifiers", "name": f"kits.verifiers_envs:{name}"}
    task = next(
        t
        for t in load_tasks(data, env="verifiers").train
        if t.data["prompt" if "prompt" in t.data else "messages"][-1]["content"] == "3+1="
    )
    policy = Policy(*says)
    found = asyncio.run(
        Gateway(agent_of_verifiers(data)).run(task, chat(tok(), policy, max_tokens=200, max_context=8192))
    )
    recorded(found, policy)
    return found, [tok().decode(r.tokens) for r in policy.requests]


def test_its_examples_are_tasks():
    tasks = load_tasks(
        {"kind": "verifiers", "name": "kits.verifiers_envs:single", "args": {"n": 12}, "holdout": 4}, env="verifiers"
    )
    assert (
        len(tasks.train) + len(tasks.held_out) == 12
        and tasks.train[0].data["example"]["answer"] == tasks.train[0].data["answer"]
    )


@pytest.mark.parametrize(("said", "worth"), [("4", 1 + 0.5 / 2), ("5", 0.5 / 2), ("44", 0.5 / 3)])
def test_the_rubrics_score_is_the_episodes(said, worth):
    found, asked = play("single", said)
    assert found.score.value == pytest.approx(worth) and found.score.parts["right"] == float(said == "4")
    assert found.score.parts.keys() >= {"right", "short"} and asked[0].count("3+1=") == 1


def test_a_rubric_that_breaks_is_a_fault_and_no_0():
    with pytest.raises(EnvError, match=r"breaks.*division by zero"):
        play("broken", "4")


def test_several_turns():
    found, asked = play("twice", "5", "4")
    assert runs(found) == 2 and found.score.value == 1.0 and asked[1].startswith(asked[0])


def test_its_tools_are_called():
    found, asked = play("tools", call("add", a=3, b=1), "4")
    assert runs(found) == 2 and "<tool_response>\n4\n" in asked[1] and found.score.value == 1.0


def test_a_run(tmp_path):
    data = {"kind": "verifiers", "name": "kits.verifiers_envs:twice", "holdout": 4}
    how = {"loop__warmup__steps": 0, "loop__steps": 2, "run__checkpoint__every": 2}
    run(tmp_path, task__env="verifiers", task__data=data, **how)
    rows = check(tmp_path, staleness=0, total=2)
    assert (
        len(rows) == 2 * 16
        and {row["reward"] for row in rows} <= {0.0, 1.0}
        and all(row["mask"][-1] for row in rows if any(row["mask"]))
    )


def test_what_is_no_environment_is_refused():
    with pytest.raises(ConfigError, match='kind = "verifiers"'):
        agent_of_verifiers({"kind": "digits"})
    with pytest.raises(ConfigError, match="no environment of verifiers"):
        agent_of_verifiers({"kind": "verifiers", "name": "kits.verifiers_envs:rows"})
