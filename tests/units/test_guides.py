"""What stands beside a group's samples: demonstrations (LUFFY) teach where the policy never
earns anything, a greedy answer is a baseline.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.engine import all_of, ask, engine
from kits.runs import events, run, tiny
from kits.train import batch, bits, model, row, step, trainer
from rondel.assemble.components import build
from rondel.core.errors import ConfigError
from rondel.core.types import DATA, GREEDY, Failed, Group, Score, Slot, Task, Trajectory
from rondel.driver.rollouts import rollouts_of
from rondel.filter.complete import Complete
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.train.pack import batch_of

PROMPTS = [[5 + i, 40, 17 + i] for i in range(4)]
ANSWERS = [[60 + i, 80 - i, 33] for i in range(4)]


def written(prompt, tokens, logprobs, reward, policy="policy"):
    t = Trajectory(policy=policy)
    t.extend(list(prompt))
    t.extend(list(tokens), logprobs=list(logprobs), versions=[0] * len(tokens))
    t.score = Score(float(reward))
    return t


def groups(loaded, number, guides):
    """Four answers of the policy to each prompt, which earn 1 only where they are the answer, and the answer itself."""
    asked = [ask(p, key=1000 * number + 4 * i + s, n=3) for i, p in enumerate(PROMPTS) for s in range(4)]
    done = asyncio.run(all_of(engine(loaded), asked))
    out = []
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS)):
        own = [written(prompt, c.tokens, c.logprobs, c.tokens == answer) for c in done[4 * i : 4 * i + 4]]
        shown = [written(prompt, answer, [0.0] * 3, 1.0, DATA) for _ in range(guides)]
        out.append(Group(i, Task(f"t{i}", "fake", {}), [*own, *shown], 0))
    return out


@torch.no_grad()
def probability(loaded) -> float:
    """Mean probability of the whole answers."""
    total = 0.0
    for prompt, answer in zip(PROMPTS, ANSWERS):
        tokens = torch.tensor([*prompt, *answer])
        logits = loaded.head.logits(loaded.hidden_states(tokens, torch.arange(6), PackedLayout([PackedSegment(0, 6)])))
        total += float(logits.log_softmax(-1)[2:5].gather(1, tokens[3:, None]).sum().exp())
    return total / len(PROMPTS)


@pytest.mark.slow
def test_luffy_learns_a_task_on_which_the_policy_earns_nothing():
    loaded, luffy = model(), row("luffy")
    assert probability(loaded) < 1e-4
    t = trainer(loaded, luffy, lr=3e-3, micro_tokens=400)
    for number in range(60):
        assert step(t, batch(groups(loaded, number, guides=1), luffy), luffy).stepped
    assert probability(loaded) > 0.5


@pytest.mark.slow
def test_without_demonstrations_the_same_task_moves_nothing():
    loaded, grpo = model(), row("grpo")
    t = trainer(loaded, grpo, lr=3e-3)
    before = bits(t)
    for number in range(3):
        step(t, batch(groups(loaded, number, guides=0), grpo), grpo)
    assert bits(t) == before


def test_a_demonstration_has_no_gap_to_the_engine():
    """Its logprobs are 0 because nobody drew it: neither the gap nor a correction may read them."""
    loaded, luffy = model(), row("luffy")
    t = trainer(loaded, luffy)
    metrics = step(t, batch(groups(loaded, 0, guides=2), luffy), luffy).metrics
    assert (
        metrics["train/mismatch_k3"] < 1e-6
        and metrics["train/gap_max"] < 1e-4
        and metrics["train/ratio_max_deviation"] == 0.0
    )


def test_demonstrations_stand_beside_the_samples_of_the_row_that_asks_for_them(tmp_path):
    """A source with a row of its own would train them as if the policy had drawn them."""
    parts = build(tiny(tmp_path, algo__kind="luffy", algo__guides=1))
    try:
        parts.rows = replace(parts.rows, of={"elsewhere": (row("grpo"), 1.0)})
        rollouts, task = rollouts_of(parts), parts.tasks.train[0]
        other = replace(task, data=task.data | {"source": "elsewhere"})

        async def policies(of: Task) -> list[str]:
            return [t.policy for t in (await rollouts.generate_group(Slot(0, of, 0))).trajectories]

        async def ask_both():
            await parts.sync(parts.trainer, parts.engine)
            return await policies(task), await policies(other)

        beside, alone = asyncio.run(ask_both())
    finally:
        parts.close()
    assert beside == ["policy"] * 4 + [DATA] and alone == ["policy"] * 4


@pytest.mark.slow
def test_beside_the_samples_stand_a_greedy_answer_and_demonstrations(tmp_path):
    """Neither is counted as the policy's; the greedy one is not trained, and its reward is the baseline."""
    parts = build(tiny(tmp_path, algo__kind="luffy", algo__guides=2))
    try:
        luffy = rollouts_of(parts)

        async def attempt():
            await parts.sync(parts.trainer, parts.engine)
            found = []
            for rollouts in (luffy, replace(luffy, guides=0, greedy=True)):
                group = await rollouts.generate_group(Slot(0, parts.tasks.train[0], 0))
                await rollouts.score(group)
                found.append(group)
            return found

        guided, greedy = asyncio.run(attempt())
    finally:
        parts.close()
    assert [t.policy for t in guided.trajectories] == ["policy"] * 4 + [DATA] * 2
    assert [t.reward for t in guided.trajectories[4:]] == [1.0, 1.0] and len(guided.policy_samples) == 4
    assert [s.guided for s in batch_of([guided]).samples] == [False] * 4 + [True] * 2
    assert [t.policy for t in greedy.trajectories] == ["policy"] * 4 + [GREEDY]
    samples = batch_of([greedy])
    assert len(samples.samples) == 4 and samples.scored_samples.greedy_N.tolist() == [greedy.baseline] * 4
    remax = row("remax")
    assert torch.equal(remax.advantage(samples.scored_samples), samples.scored_samples.rewards_N - greedy.baseline)


def test_a_group_whose_greedy_answer_could_not_be_scored_is_a_failure():
    own = [written([5], [6], [-1.0], r) for r in (0, 1)]
    lost = written([5], [7], [0.0], 0, GREEDY)
    lost.score = Failed("timeout")
    group = Group(0, Task("t", "fake", {}), [*own, lost], 0)
    assert Complete(2)(group).keep
    verdict = Complete(2, greedy=True)(group)
    assert not verdict.keep and verdict.failed and verdict.reason == "timeout"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algo__kind": "luffy"}, "set algo.guides = 1"),
        ({"algo__guides": 1}, "algo.guides = 1 has no effect on kind = 'grpo'"),
    ],
)
def test_demonstrations_nobody_reads_and_readers_without_any_are_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        build(tiny(tmp_path, **changes)).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "beside", "trained"),
    [({"algo__kind": "luffy", "algo__guides": 1}, DATA, True), ({"algo__kind": "remax"}, GREEDY, False)],
)
def test_whole_runs(tmp_path, changes, beside, trained):
    """Every group is stored with what stood beside it; a demonstration is trained, a greedy answer is not."""
    run(tmp_path, loop__steps=2, loop__warmup__steps=1, **changes)
    for event, number in zip(events(tmp_path, "StepDone")[-2:], store.stored_steps(tmp_path)[-2:]):
        rows = store.read_step(tmp_path, number)
        for group in {r["group"] for r in rows}:
            *own, last = [r for r in rows if r["group"] == group]
            assert [r["policy"] for r in own] == ["policy"] * 4 and last["policy"] == beside
            if trained:
                assert max(last["advantages"]) == pytest.approx(1 - np.mean([r["reward"] for r in (*own, last)]))
        assert event["metrics"]["train/tokens"] == sum(
            sum(r["mask"]) for r in rows if r["policy"] == "policy" or trained
        )
