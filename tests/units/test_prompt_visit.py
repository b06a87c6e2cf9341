"""A prompt without a success is asked again: how often, what is kept and counted, and the same again after a resume."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from kits.algos import near, scored, tensor
from kits.algos_oracle import anchored
from kits.runs import final, run, run_and_die, tiny
from rondel.algos.table import TABLE, resolve_algorithm
from rondel.algos.visit_advantage import Anchored
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import ATTEMPTS, SOLVED, Failed, Score, Trajectory
from rondel.driver.prompt_visit import PromptVisit
from rondel.runtime.journal import store

ALGO = {"kind": "ngu", "group_size": 2, "advantage": {"again": 0.9, "rounds": 4, "kept": 2}}


def round_of(*rewards: float | None) -> list[list[Trajectory]]:
    return [[Trajectory(score=Failed("verifier") if r is None else Score(float(r), {"p": 1.0}))] for r in rewards]


def visit(again: float = 0.999, most: int = 5, kept: int = 2, seed: int = 0, number: int = 7) -> PromptVisit:
    return PromptVisit("t", seed, number, again, most, kept)


def test_ngu_anchors_at_the_right_ones_and_adds_up_to_0():
    """Two groups: one with all its rounds, which is r - mean; one whose first rounds are counted alone."""
    rewards, group = tensor(0, 0, 1, 0, 1, 0, 0), torch.tensor([3, 3, 3, 3, 5, 5, 5])
    n, s = tensor(4, 4, 4, 4, 9, 9, 9), tensor(1, 1, 1, 1, 1, 1, 1)
    found = Anchored()(scored(rewards, group, **{ATTEMPTS: n, SOLVED: s}))
    assert near(found[:4], rewards[:4] - 0.25) and near(found[4:], [8 / 9, -4 / 9, -4 / 9])
    assert near(found[4:], [anchored([1.0, 0.0, 0.0], own, 9, 1) for own in (1.0, 0.0, 0.0)])
    assert near(Anchored()(scored(rewards[:4])), rewards[:4] - 0.25)
    assert Anchored()(scored(tensor(1, 1))).tolist() == Anchored()(scored(tensor(0, 0))).tolist() == [0.0, 0.0]


def test_it_asks_again_until_a_success_and_keeps_the_last_rounds():
    v = visit()
    assert (
        v.should_ask_again(round_of(0, 0))
        and v.should_ask_again(round_of(0, 0))
        and not v.should_ask_again(round_of(0, 1))
    )
    kept = v.close()
    assert [e[0].reward for e in kept] == [0, 0, 0, 1] and (v.rounds, v.attempts, v.solved) == (3, 6, 1)
    assert all(e[0].score.parts == {"p": 1.0, ATTEMPTS: 6.0, SOLVED: 1.0} for e in kept)


def test_it_gives_up():
    v = visit(most=3)
    assert [v.should_ask_again(round_of(0, 0)) for _ in range(3)] == [True, True, False]
    assert not visit(again=0.0).should_ask_again(round_of(0, 0))
    assert not visit().should_ask_again(round_of(0, None)), "an answer without a score ends it"
    assert not visit().should_ask_again(round_of(1, 1))
    with pytest.raises(DataError, match=r"an answer earned 0\.5, and .* counts rewards of 0 and 1"):
        visit().should_ask_again(round_of(0, 0.5))


def test_how_often_it_asks_is_a_geometric_draw_that_can_be_repeated():
    def rounds(seed: int, number: int) -> int:
        v = visit(again=0.5, most=60, seed=seed, number=number)
        while v.should_ask_again(round_of(0)):
            pass
        return v.rounds

    drawn = [rounds(1, number) for number in range(2000)]
    assert drawn == [rounds(1, number) for number in range(2000)] != [rounds(2, number) for number in range(2000)]
    for k in (1, 2, 3):  # P(rounds = k) = 0.5^k, within six deviations
        p = 0.5**k
        assert abs(drawn.count(k) / 2000 - p) < 6 * (p * (1 - p) / 2000) ** 0.5


@pytest.mark.slow
def test_a_run_trains_rounds_as_one_group_and_goes_on_with_the_same(tmp_path):
    """Killed in the middle and resumed: the weights of a run that nobody interrupted, and the same groups."""
    changes = {"algo": ALGO, "loop__steps": 4, "loop__warmup__steps": 4, "task__reward": "kits.rewards:parity"}
    run(tmp_path / "whole", **changes)
    assert run_and_die(tmp_path / "cut", ("GroupFinished", 30), signal.SIGKILL, **changes) == -signal.SIGKILL
    run(tmp_path / "cut", **changes)
    whole, cut = final(tmp_path / "whole"), final(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    found = {}
    for folder in (tmp_path / "whole", tmp_path / "cut"):
        groups = [
            g for step in store.stored_steps(folder) if step > 4 for g in store.groups_of(store.read_step(folder, step))
        ]
        found[folder] = [(g.id, [(t.tokens, t.score.parts[ATTEMPTS]) for t in g.trajectories]) for g in groups]
        for group in groups:
            n, s = (int(group.trajectories[0].score.parts[name]) for name in (ATTEMPTS, SOLVED))
            assert s >= 1 and len(group.trajectories) == min(n, 4) and n % 2 == 0, "kept: two rounds of two"
            assert sum(group.rewards) == s and 0 < s < len(group.trajectories)
            assert all(v in (-1, group.born) for t in group.trajectories for v in t.versions), (
                "S = 0: no older than that"
            )
    assert found[tmp_path / "whole"] == found[tmp_path / "cut"]
    assert any(len(answers) > 2 for _, answers in found[tmp_path / "whole"]), "some prompt was asked again"


@pytest.mark.slow
def test_no_round_is_older_than_its_group_may_be(tmp_path):
    """S = 1: a group of several rounds is trained at most one version after its birth, and no token is older than it."""
    changes = {"algo": ALGO, "loop__steps": 4, "loop__warmup__steps": 0, "task__reward": "kits.rewards:parity"}
    run(tmp_path, loop__max_staleness=1, **changes)
    groups = {step: store.groups_of(store.read_step(tmp_path, step)) for step in store.stored_steps(tmp_path)}
    assert len(groups) == 4 and any(len(g.trajectories) > 2 for own in groups.values() for g in own)
    for step, own in groups.items():
        for group in own:
            drawn = [v for t in group.trajectories for v in t.versions if v >= 0]
            assert step - 1 - group.born <= 1 and group.born <= min(drawn) and max(drawn) <= step - 1


@pytest.mark.parametrize(
    "section,message",
    [
        ({"advantage": {"again": 1.0}}, r"it must lie in \[0, 1\)"),
        ({"advantage": {"kept": 9}}, "1 <= kept <= rounds"),
        ({"shaping": {"kind": "overlong"}}, r"algo\.shaping = .* counts rewards of 0 and 1"),
        ({"kl": {"coef": 0.1, "where": "reward"}}, "let the KL be a term of the loss"),
    ],
)
def test_what_does_not_go_with_counts_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm({"kind": "ngu", **section})
    assert TABLE["ngu"].filters == ("signal",) and replace(Anchored(), again=0.0).asks_again == (0.0, 8, 4)


@pytest.mark.slow
def test_rewards_between_0_and_1_are_refused_in_a_run(tmp_path):
    job = tiny(tmp_path, algo=ALGO, task__reward="kits.rewards:thirds", loop__warmup__steps=0, loop__steps=1)
    from rondel.assemble import train

    with pytest.raises(ExceptionGroup) as caught:
        train(job, quiet=True)
    assert caught.group_contains(DataError, match="Take a reward that says right or wrong")
