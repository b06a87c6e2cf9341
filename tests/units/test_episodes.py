"""Episodes of several trajectories: a branch has its episode's score, is counted once in
every baseline, and costs its own tokens only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kits.runs import events, run
from kits.train import apart, batch, forked_group, gradient, model, row, trainer, trajectory
from rondel.buffer.state import decode, encode
from rondel.core.errors import ConfigError, EnvError, UserError
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.generate.envs.episode import as_trajectories, assign_parents, join_episodes
from rondel.runtime.journal import store
from rondel.train.annotate import compute_advantages
from rondel.train.pack import TrainBatch, batch_of

TASK = Task("t", "fake", {})


def test_the_first_of_each_agent_is_its_root_and_what_nothing_was_written_in_is_left_out():
    rng = np.random.default_rng(0)

    def made(agent: str = "", score: float | None = None, wrote: int = 2) -> Trajectory:
        t = trajectory([(wrote, 1)] if wrote else [], rng, prompt=[5])
        t.agent, t.score = agent, None if score is None else Score(score)
        return t

    found = join_episodes(
        map(
            assign_parents,
            [
                [made(wrote=0), made()],
                [made("a"), made("b"), made("a"), made("b", score=2.0), made("c", wrote=0)],
                [made(wrote=0)],
            ],
        )
    )
    assert [(t.agent, t.parent, t.written) for t in found] == [
        ("", None, 2),
        ("a", None, 2), ("a", 1, 2), ("b", None, 2), ("b", None, 2), ("c", None, 0),
        ("", None, 0),
    ]  # fmt: skip
    with pytest.raises(EnvError, match="empty list"):
        as_trajectories([])


def test_a_trajectory_is_trained_once():
    """An environment that keeps its chat in `self` returns that of the last episode for all of them."""
    one, other = Trajectory(), Trajectory()
    with pytest.raises(UserError, match="would be trained twice"):
        as_trajectories([one, other, one])
    with pytest.raises(UserError, match=r"same trajectory for two episodes.*not in self"):
        join_episodes([[one], [other], [one]])
    assert join_episodes([as_trajectories([one, other])]) == [one, other]


def test_a_baseline_counts_an_episode_once_however_often_it_was_forked():
    group = forked_group()
    alone = Group(group.id, TASK, group.root_trajectories, 0)
    assert group.rewards == alone.rewards == [1.0, 0.0, 0.5]
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce", "maxrl"):
        whole, plain = batch([group], row(kind)), batch([alone], row(kind))
        firsts = [s for s in whole.samples if s.parent is None]
        for mine, its in zip(firsts, plain.samples, strict=True):
            assert np.array_equal(mine.known.advantages.numpy(), its.known.advantages.numpy())
        for s in whole.samples:
            assert len(s.known.advantages.numpy()) == len(s.trainable)
            if s.parent is not None:
                root = next(r for r in firsts if r.index == s.parent)
                assert set(s.known.advantages.numpy()) == {root.known.advantages.numpy()[0]}


def test_agents_are_compared_with_their_own_kind():
    """A zero-sum game: side a wins 2 of 4. Each side's baseline is its own mean; together the mean
    would be 0 for both.
    """
    rng = np.random.default_rng(1)
    episodes = []
    for won in (1.0, 1.0, 0.0, 0.0):
        pair = [
            trajectory([(3, 1)], rng, prompt=[5, 6], reward=won),
            trajectory([(4, 1)], rng, prompt=[7], reward=-won),
        ]
        pair[0].agent, pair[1].agent = "a", "b"
        episodes.append(pair)
    group = Group(0, TASK, join_episodes(map(assign_parents, episodes)), 0)
    got = [float(s.known.advantages.numpy()[0]) for s in batch([group], row("dr_grpo")).samples]
    assert got == [0.5, -0.5, 0.5, -0.5, -0.5, 0.5, -0.5, 0.5]
    apart = [
        batch([Group(i, TASK, [t for t in group.trajectories if t.agent == a], 0)], row("grpo"))
        for i, a in enumerate("ab")
    ]
    whole = batch([group], row("grpo"))
    for i, alone in enumerate(apart):
        for mine, its in zip(whole.samples[i::2], alone.samples, strict=True):
            assert np.array_equal(mine.known.advantages.numpy(), its.known.advantages.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_gradient_is_that_of_the_walks_one_by_one(kind, kl):
    """Law 3, with a tree: a shared trainable token weighs the sum over its leaves, and
    denominators are counted as if unrolled.
    """
    algo, t = row("grpo", kl={"coef": kl}), trainer(model(kind), row("grpo", kl={"coef": 0.1}))
    tree = batch([forked_group(), forked_group(5, number=9)], algo)
    t._annotate(tree, algo.needs | {"proximal_logprobs"})
    compute_advantages(tree, algo)
    walks = TrainBatch(
        [replace(s, group=i, index=0, parent=None, known=replace(s.known)) for i, s in enumerate(tree.samples)]
    )
    t._annotate(walks, algo.needs | {"proximal_logprobs"})
    assert all(
        np.allclose(a.known.proximal.numpy(), b.known.proximal.numpy(), atol=1e-5)
        for a, b in zip(tree.samples, walks.samples)
    )
    whole = gradient(t, walks, algo, share=False, noted=True)
    assert whole.norm() > 1e-3
    for micro_tokens in (10**6, 60, 30):
        assert apart(gradient(t, tree, algo, micro_tokens=micro_tokens, noted=True), whole) <= 1e-6


@pytest.mark.parametrize("kind", ["reinforce_pp_baseline", "reinforce_pp"])
def test_a_row_that_credits_tokens_names_the_branches_it_cannot_share_a_number_with(kind):
    with pytest.raises(ConfigError, match=f"'{kind}' gives every token a credit of its own.*group 3, sample 0"):
        compute_advantages(batch_of([forked_group()]), row(kind))


def test_it_is_stored_and_read_back_and_survives_the_journal(tmp_path):
    group = forked_group()
    group.trajectories[1].agent = "searcher"
    for t in group.trajectories:
        t.logprobs = np.asarray(t.logprobs, np.float32).tolist()  # as engines give them
    assert decode(encode(group)) == group
    store.write_step(tmp_path, 1, [group])
    assert store.groups_of(store.read_step(tmp_path, 1)) == [group]


class Forking:
    """An environment whose harness throws its history away: two walks from one opening."""

    async def run(self, task, chat):
        chat.give([{"role": "user", "content": task.data["prompt"]}])
        await chat.reply()
        one = chat.trajectory
        other = Trajectory(one.tokens[:], one.mask[:], one.logprobs[:], one.versions[:], text=one.text)
        chat.give([{"role": "user", "content": " again"}])
        await chat.reply()
        other.extend([5, 6])
        return [one, other]


@pytest.mark.slow
def test_a_run_trains_on_walks_and_its_ledger_counts_groups(tmp_path):
    folder = tmp_path / "run"
    run(folder, task__env="test_episodes:Forking", loop__steps=3, loop__warmup__steps=0, run__checkpoint__every=3)
    [*_, last] = events(folder, "StepDone")
    assert last["step"] == 3
    rows = store.read_step(folder, 2)
    parents = [r["parent"] for r in rows if r["group"] == rows[0]["group"]]
    assert len(parents) == 8 and parents[::2] == [None] * 4 and parents[1::2] == [0, 2, 4, 6]
    groups = store.groups_of(rows)
    assert all(
        t.reward == g.trajectories[t.parent].reward for g in groups for t in g.trajectories if t.parent is not None
    )
    assert all(len(e["rewards"]) == 4 for e in events(folder, "GroupFinished"))
