"""CoDaPO's two phases: what the focused batch asks, in simulation, in a run, and after a resume."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import pytest
import torch

from kits.runs import final, run, run_and_die
from rondel.algos.question_value import QuestionValue
from rondel.algos.scored_samples import ScoredSamples
from rondel.core.errors import ConfigError, DataError
from rondel.core.events import GroupsTaken
from rondel.core.types import Failed, Group, Score, Task, Trajectory
from rondel.generate.envs.curriculum import build_curriculum
from rondel.generate.envs.focused_order import FocusedOrder
from rondel.generate.envs.order import ShuffledOrder
from rondel.runtime.journal import store

TASKS = [Task(f"t{i}", "fake", {"prompt": str(i)}) for i in range(20)]


def answered(task: Task, number: int, rewards: list[float], logprob: float = -0.5) -> Group:
    group = Group(number, task, [], 0)
    for i, reward in enumerate(rewards):
        t = Trajectory(score=Score(reward, {"acc": 1 - reward}))
        t.extend([1, 2])
        t.extend([3] * (1 + i), logprobs=[logprob] * (1 + i), versions=[0] * (1 + i))
        group.trajectories.append(t)
    return group


def test_the_value_is_that_of_the_advantage():
    groups = [answered(TASKS[0], 0, [1, 0, 0], -0.3), answered(TASKS[1], 1, [1, 0, 1, 0], -0.9)]
    samples = [t for group in groups for t in group.trajectories]
    told = ScoredSamples(
        torch.tensor([t.reward for t in samples], dtype=torch.float64),
        torch.tensor([0] * 3 + [1] * 4),
        torch.tensor([t.written for t in samples]),
        behavior_T=torch.tensor([x for t in samples for x, own in zip(t.logprobs, t.mask) if own], dtype=torch.float64),
    )
    wanted = QuestionValue().values_N(told)[[0, 3]].tolist()
    assert [FocusedOrder(TASKS, 0).value_of(g) for g in groups] == pytest.approx(wanted, abs=1e-12)
    assert wanted[1] == pytest.approx(math.exp(-0.9), abs=1e-12)
    broken = answered(TASKS[2], 2, [1, 0])
    broken.trajectories[0].score = Failed("verifier")
    assert FocusedOrder(TASKS, 0).value_of(broken) == 0.0 == FocusedOrder(TASKS, 0).value_of(Group(0, TASKS[0], [], 0))
    assert FocusedOrder(TASKS, 0, part="acc").value_of(groups[1]) == pytest.approx(math.exp(-0.9), abs=1e-12)
    with pytest.raises(DataError, match="has no such part; it has: acc"):
        FocusedOrder(TASKS, 0, part="right").value_of(groups[0])


def test_every_other_batch_asks_the_best_of_the_one_before():
    """Batches of five; the two best, in turn; then the shuffled order goes on where it was, also in a copy."""
    order, plain, n = FocusedOrder(TASKS, 3, top=2), ShuffledOrder(TASKS, 3), 0
    for cycle in range(3):
        asked = [order.task_at(n + i) for i in range(5)]
        assert asked == [plain.task_at(5 * cycle + i) for i in range(5)]
        rewards = [[1, 1], [1, 0], [0, 0], [1, 0], [0, 0]]
        sure = [-0.1, -0.9, -0.1, -0.2, -0.1]
        groups = [answered(t, n + i, r, p) for i, (t, r, p) in enumerate(zip(asked, rewards, sure, strict=True))]
        order.on_event(GroupsTaken(2 * cycle, 0, groups))
        copy = FocusedOrder(TASKS, 3, top=2)
        copy.load(order.state_dict())
        order, n = copy, n + 5
        focused = [order.task_at(n + i) for i in range(5)]
        assert focused == [asked[3], asked[1], asked[3], asked[1], asked[3]]
        order.on_event(GroupsTaken(2 * cycle + 1, 0, [answered(t, n + i, [1, 0]) for i, t in enumerate(focused)]))
        copy = FocusedOrder(TASKS, 3, top=2)
        copy.load(order.state_dict())
        order, n = copy, n + 5


@pytest.mark.slow
def test_a_run_in_two_phases_goes_on_as_it_was(tmp_path):
    changes = {
        "algo__kind": "codapo",
        "task__curriculum": {"kind": "focused", "top": 2},
        "task__reward": "kits.rewards:parity",
        "loop__steps": 4,
        "loop__warmup__steps": 0,
        "run__checkpoint__every": 1,
    }
    run(tmp_path / "whole", **changes)
    assert run_and_die(tmp_path / "cut", ("GroupFinished", 10), signal.SIGKILL, **changes) == -signal.SIGKILL
    run(tmp_path / "cut", **changes)
    whole, cut = final(tmp_path / "whole"), final(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    steps = [store.groups_of(store.read_step(tmp_path / "whole", step)) for step in range(1, 5)]
    rule = FocusedOrder(TASKS, 0)
    for original, focused in ((steps[0], steps[1]), (steps[2], steps[3])):
        best = sorted(original, key=lambda g: (-rule.value_of(g), g.id))[:2]
        assert [g.task.id for g in focused] == [best[i % 2].task.id for i in range(4)]
        assert len({g.id for g in focused}) == 4 and all(g.born == focused[0].born for g in focused)
        assert focused[0].born == original[0].born + 1, "by the weights that learned the first"


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"loop__max_staleness": 1}, "set loop.max_staleness = 0"),
        ({"task__filters": ["signal"]}, r"filters leave groups out \(signal\)"),
        ({"task__curriculum": {"kind": "focused", "top": 9}}, "a batch has 4: lower it"),
        ({"task__curriculum": {"kind": "focused", "top": 0}}, "at least one question"),
    ],
)
def test_what_does_not_go_with_a_batch_that_decides_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **{"task__curriculum": {"kind": "focused"}, **changes})
    assert isinstance(build_curriculum(TASKS, 0, {"kind": "focused"}), FocusedOrder)
    assert replace(QuestionValue(), delta=0.0).delta == 0
