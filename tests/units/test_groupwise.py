"""Rewards that see the whole group: one call for all answers to a task, in order, and what fails is each one's failure."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kits.no_rows import NO_ROWS
from kits.runs import events, run, tiny
from my_group_reward import rank
from rondel.core.types import EnvFault, Failed, Sampling, Score, Slot, Task, Trajectory
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.rollouts import GroupRollouts
from rondel.generate.envs.episode import EpisodeState
from rondel.score import build_reward
from rondel.score.pool import RewardPool
from rondel.score.preflight import check_reward
from rondel.score.worker import call_reward

TASK = Task("t", "x", {"answer": "7"})


def said(*texts):
    return [Trajectory(text=text, tokens=list(range(len(text))), mask=[1] * len(text)) for text in texts]


def graded(reward, trajectories, task=TASK):
    """By what a worker does, in this process."""
    built = build_reward(reward)
    assert built.groupwise
    with asyncio.Runner() as runner:
        return call_reward(built, trajectories, task, runner)


def graded_by_a_worker(reward, trajectories, task=TASK):
    with RewardPool(reward) as pool:
        assert pool.groupwise
        return asyncio.run(pool.score_group(trajectories, task))


@pytest.mark.parametrize("graded", [graded, graded_by_a_worker])
def test_one_call_sees_all_answers(graded):
    assert graded("kits.group_rewards:place", said("8", "7", "9")) == [
        Score(1.0, {"place": 1.0, "of": 0.0}),
        Score(0.0, {"place": 0.0, "of": 0.0}),
        Score(2.0, {"place": 2.0, "of": 0.0}),
    ]
    assert graded("kits.group_rewards:Together", said("a", "b")) == [Score(2.0), Score(2.0)]


def test_what_is_wrong_with_a_score_is_that_answers_failure_alone():
    assert graded("kits.group_rewards:broken", said("a", "b", "c")) == [
        Score(0.5),
        Failed("returned nan"),
        Failed("returned None"),
    ]


@pytest.mark.parametrize(
    "reward, data, reason",
    [
        ("kits.group_rewards:broken", {"raise": True}, "raised ValueError"),
        ("kits.group_rewards:Together", {"short": True}, "graded another group"),
    ],
)
def test_what_is_wrong_with_the_call_is_each_ones_failure(reward, data, reason):
    found = graded_by_a_worker(reward, said("a", "b", "c"), Task("t", "x", data))
    assert [one.reason for one in found] == [reason] * 3


def test_a_part_of_combine_sees_the_group_beside_parts_that_see_one_answer():
    parts = {"correct": {"kind": "number", "weight": 2.0}, "place": "kits.group_rewards:place"}
    found = graded({"kind": "combine", "parts": parts}, said("8", "7"))
    assert found == [Score(1.0, {"correct": 0.0, "place": 1.0}), Score(2.0, {"correct": 2.0, "place": 0.0})]
    by = {"kind": "by", "field": "source", "parts": {"ranked": "kits.group_rewards:place", "sums": "number"}}
    assert [s.value for s in graded(by, said("8", "7"), Task("t", "x", {"source": "ranked"}))] == [1.0, 0.0]
    sums = Task("t", "x", {"source": "sums", "answer": "7"})
    assert [s.value for s in graded(by, said("8", "7"), sums)] == [0.0, 1.0]


def test_settings_reach_a_groupwise_function():
    found = graded({"kind": "my_group_reward:rank", "window": 1.0}, said("7", "is 7", "8"))
    assert [one.value for one in found] == [1.0, 0.25, 0.0] == list(rank(said("7", "is 7", "8"), TASK, window=1.0))


@pytest.mark.slow
def test_the_check_asks_about_the_three_answers_of_a_task_together():
    async def check():
        return await check_reward(pool, [TASK, Task("u", "x", {"answer": "5"})])

    with RewardPool("my_group_reward:rank") as pool:
        assert all(finding.ok for finding in asyncio.run(check()))


class Quiet(GroupRollouts):
    def open_chat(self, *args, **settings):
        return SimpleNamespace(episode=EpisodeState())


class Env:
    """Sample 1 breaks, sample 2 is scored by the world."""

    def __init__(self):
        self.begun = 0

    async def run(self, task, chat):
        number, self.begun = self.begun, self.begun + 1
        fault = EnvFault("no disk") if number == 1 else None
        score = Score(5.0) if number == 2 else None
        return Trajectory(text=str(number), score=score, **({"outcome": fault} if fault else {}))


class Grader:
    groupwise = True

    def __init__(self, down=0):
        self.asked, self.down = [], down

    async def score_group(self, trajectories, task):
        self.asked.append([t.text for t in trajectories])
        self.down -= 1
        return [Failed("down") if self.down >= 0 else Score(float(t.text)) for t in trajectories]


def group_of(tmp_path, pool, failures, env=None):
    parts = SimpleNamespace(
        job=tiny(tmp_path), sampling=Sampling(), env=env or Env(), pool=pool, rows=NO_ROWS, failures=failures
    )
    return asyncio.run(Quiet(parts, group_size=4).generate_group(Slot(0, TASK, 0)))


def test_who_is_broken_or_scored_by_the_world_is_not_in_the_call(tmp_path):
    grader = Grader()
    found = group_of(tmp_path, grader, FailureBudget())
    assert grader.asked == [["0", "3"]]
    assert [t.score for t in found.trajectories] == [
        Score(0.0),
        Failed("environment fault", "no disk"),
        Score(5.0),
        Score(3.0),
    ]


class Branching(Env):
    """Each episode has a branch; that of sample 1 has a score of its own."""

    async def run(self, task, chat):
        number, self.begun = self.begun, self.begun + 1
        root, branch = said(f"{number}"), said(f"{number}")
        branch[0].score = Score(7.0) if number == 1 else None
        return root + branch


class Moody(Grader):
    """Grades all but one at first, and otherwise when it is asked again."""

    async def score_group(self, trajectories, task):
        self.asked.append([t.text for t in trajectories])
        if len(self.asked) == 1:
            return [Score(-1.0) if t.text != "2" else Failed("down") for t in trajectories]
        return [Score(float(t.text)) for t in trajectories]


def test_branches_follow_their_episode_when_a_group_is_graded_again(tmp_path):
    failures = FailureBudget(0.5, patience=60, first=0.001)
    failures.recent.extend(["down"] * 100)
    found = group_of(tmp_path, Moody(), failures, Branching())
    assert [t.text for t in found.trajectories] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert [t.score.value for t in found.trajectories] == [0.0, 0.0, 1.0, 7.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.slow
def test_a_run_is_graded_by_group(tmp_path):
    run(tmp_path, task__reward="kits.group_rewards:Together", loop__steps=2, task__eval__every=2, task__eval__samples=3)
    rewards = [event["rewards"] for event in events(tmp_path, "GroupFinished") if event["rewards"]]
    assert rewards and all(own == [4.0] * 4 for own in rewards[-4:])
    assert events(tmp_path, "Evaluated")[-1]["score"] == 3.0
