"""Worlds of Gymnasium: rewards where they were earned, closed whatever happens, and nobody waits for a slow one."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from kits.chat import chat
from kits.command_line import SMALL, TINY
from kits.gateway import Policy, recorded, runs, tok
from kits.runs import check, run
from rondel.cli import main
from rondel.core.errors import ConfigError, EnvError
from rondel.core.protocols import SelfScoringEnv
from rondel.core.types import Task
from rondel.generate.envs.gym import Gym
from rondel.generate.envs.repository.env import RepositoryEnv
from rondel.generate.envs.sources import load_tasks

gymnasium = pytest.importorskip("gymnasium")


class World:
    """Says what it heard; the third action ends it."""

    closed, fails, waits = 0, False, None

    def reset(self, *, seed=None):
        self.heard = 0
        return f"seed {seed}", {}

    def step(self, action):
        self.heard += 1
        if self.waits is not None:
            self.waits.wait(20)
        if self.fails:
            raise RuntimeError("the roof is down")
        return f"heard {action}", 0.5 * self.heard, self.heard == 3, False, {}

    def close(self):
        type(self).closed += 1


sys.modules.setdefault("test_gym_world", sys.modules[__name__])
TASK = Task("w/3", "gym", {"world": "test_gym_world:World", "seed": 3})


def play(*says: str, turns: int = 8, timeout: float = 30.0, **how):
    policy = Policy(*says)
    found = asyncio.run(Gym(turns=turns, timeout=timeout).run(TASK, chat(tok(), policy, **{"max_tokens": 60, **how})))
    recorded(found, policy)
    return found, [tok().decode(r.tokens) for r in policy.requests]


def test_an_episode_and_where_it_earned():
    before = World.closed
    found, asked = play("one", "two", "three")
    assert "seed 3" in asked[0] and "heard one" in asked[1] and "heard two" in asked[2] and World.closed == before + 1
    assert found.score.value == 0.5 + 1.0 + 1.5 and [value for _, value in found.score.steps] == [0.5, 1.0, 1.5]
    ends = [at for at, mine in enumerate(found.mask) if mine and (at + 1 == len(found.mask) or not found.mask[at + 1])]
    assert [at for at, _ in found.score.steps] == ends and found.finish_reason == "stop"


def test_the_turns_are_its_budget():
    found, _ = play("one", "two", turns=2)
    assert runs(found) == 2 and found.finish_reason == "length" and found.score.value == 1.5


def test_a_full_context_ends_it():
    found, _ = play("one", "two", "three", max_context=60)
    assert 1 <= runs(found) < 3 and len(found.tokens) <= 60 and found.finish_reason == "length"


def test_a_world_that_breaks_or_hangs_is_a_fault(monkeypatch):
    monkeypatch.setattr(World, "fails", True)
    before = World.closed
    with pytest.raises(
        EnvError, match="step of the world 'test_gym_world:World' raised RuntimeError: the roof is down"
    ):
        play("one")
    assert World.closed == before + 1
    monkeypatch.setattr(World, "waits", threading.Event())
    with pytest.raises(EnvError, match=r"did not end within 0\.2 s"):
        play("one", timeout=0.2)
    World.waits.set()


def test_a_slow_world_delays_nobody(monkeypatch):
    """All three wait in their first step at once: a barrier that only opens when all have come."""
    monkeypatch.setattr(World, "waits", threading.Barrier(3))

    async def three():
        policies = [Policy("one", "two", "three") for _ in range(3)]
        return await asyncio.gather(*(Gym().run(TASK, chat(tok(), p, max_tokens=60)) for p in policies))

    assert [t.score.value for t in asyncio.run(three())] == [3.0] * 3


def test_tasks_are_seeds_and_an_id_is_gymnasiums():
    tasks = load_tasks({"kind": "gym", "name": "guess_world:make", "n": 12, "holdout": 3}, env="gym")
    assert len(tasks.held_out) == 3 and sorted(t.data["seed"] for t in [*tasks.train, *tasks.held_out]) == list(
        range(12)
    )
    with pytest.raises(EnvError, match="NoSuchWorld"):
        asyncio.run(Gym().run(Task("x", "gym", {"world": "NoSuchWorld-v0", "seed": 0}), chat(tok(), Policy("a"))))
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        asyncio.run(Gym().run(Task("x", "gym", {"world": "nowhere:make", "seed": 0}), chat(tok(), Policy("a"))))


@pytest.mark.slow
def test_a_run_of_the_example(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    data = {"kind": "gym", "name": "guess_world:make", "n": 40, "holdout": 4}
    run(
        tmp_path,
        task__env={"kind": "gym", "turns": 3},
        task__data=data,
        loop__warmup__steps=0,
        loop__steps=2,
        engine__sampling__max_tokens=1,
    )
    rows = check(tmp_path, staleness=0, total=2)
    assert len(rows) == 32 and all(-0.03 - 1e-9 <= row["reward"] <= 0.99 for row in rows)


@pytest.mark.slow
def test_no_reward_is_asked_about_episodes_that_their_world_scores(tmp_path, monkeypatch, capfd):
    """`rondel check` would call task.reward's "number" on tasks without an answer, and tell the user to repair it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    world = ("--task.env.kind=gym", "--task.env.turns=3", "--task.data.kind=gym", "--task.data.name=guess_world:make")
    with pytest.raises(SystemExit):
        main(["check", str(TINY), *world, *SMALL, f"--run.folder={tmp_path / 'run'}"])
    told = capfd.readouterr().out
    assert "its scores were not tried" in told and "reward" not in told.replace("mixed rewards", "").replace(
        "mean reward", ""
    )
    assert isinstance(Gym(), SelfScoringEnv) and isinstance(RepositoryEnv(lambda: None), SelfScoringEnv)


@pytest.mark.slow
def test_levels_of_reasoning_gym_come_easy_first():
    from rondel.core.errors import ConfigError, DataError
    from rondel.generate.envs.curriculum import build_curriculum

    pytest.importorskip("reasoning_gym")
    data = {"kind": "reasoning_gym", "name": "chain_sum", "size": 31, "levels": [0, 2, 4]}
    tasks = load_tasks(data, env="single_turn").train
    terms = {
        level: {t.data["entry"]["metadata"]["num_terms"] for t in tasks if t.data["level"] == level}
        for level in (0, 2, 4)
    }
    assert terms == {0: {2}, 2: {4}, 4: {6}} and len(tasks) == 31
    order = build_curriculum(tasks, 0, {"kind": "easy_first", "by": "level", "start": 0.3, "admissions": 200})
    early, late = ([order.task_at(n).data["level"] for n in range(a, a + 40)] for a in (0, 400))
    assert sum(early) / 40 < 0.5 < 1.2 < sum(late) / 40
    for levels, error, said in (
        ([99], DataError, "goes from 0 to"),
        (["a"], ConfigError, r"task\.data\.levels .* valid integer"),
    ):
        with pytest.raises(error, match=said):
            load_tasks({**data, "levels": levels}, env="single_turn")
