"""algos/distill.py: learning from a teacher on the policy's own samples lowers the reverse KL, with no reward at all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import all_of, ask, engine
from run_kit import events, run, tiny
from train_kit import KINDS, SMALL, batch, model, row, step, trainer

from rondel.algos.scored import Scored
from rondel.assemble.parts import build
from rondel.models.attention import PackedLayout, Segment
from rondel.models.load import load
from rondel.runtime.journal import store
from rondel.train.pack import Batch
from rondel.words.errors import ConfigError
from rondel.words.types import Group, Score, Task, Trajectory

V = 7


def test_its_expected_gradient_is_that_of_the_reverse_kl():
    """sum_v p_v·(-A_v)·∇log p_v = ∇KL(policy || teacher), with A_v = -(log p_v - log q_v)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(V, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(V, dtype=torch.float64, generator=generator).log_softmax(0)
    logp = logits.log_softmax(0)
    opd = row("opd")
    scored = Scored(torch.zeros(V), torch.arange(V), torch.ones(V, dtype=torch.int64), behavior_T=logp.detach(), teacher_T=teacher)
    advantages = opd.advantages_T(scored)
    ours = torch.autograd.grad((logp.detach().exp() * -advantages * logp).sum(), logits, retain_graph=True)[0]
    wanted = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)[0]
    assert torch.allclose(ours, wanted, atol=1e-12)


def test_a_reward_and_a_teacher_add_up_and_a_coefficient_of_zero_is_no_teacher():
    generator = torch.Generator().manual_seed(1)
    rewards, groups, lengths = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 1]), torch.tensor([2, 0, 3])
    behavior, teacher = torch.randn(5, generator=generator), torch.randn(5, generator=generator)
    scored = Scored(rewards, groups, lengths, behavior_T=behavior, teacher_T=teacher)
    plain, taught = row("grpo"), row("grpo", distill={"coef": 0.5})
    assert torch.allclose(taught.advantages_T(scored), plain.advantages_T(scored) - 0.5 * (behavior - teacher))
    assert torch.equal(row("grpo", distill={"coef": 0.0}).advantages_T(scored), plain.advantages_T(scored))
    assert "teacher_logprobs" in taught.needs and "teacher_logprobs" not in plain.needs


def rollouts(loaded, number: int) -> list[Group]:
    """The policy's own answers to a few prompts; every reward is 0."""
    asked = [ask([5 + i, 11, 23], key=1000 * number + 16 * i + s, n=6) for i in range(4) for s in range(16)]
    done = asyncio.run(all_of(engine(loaded), asked))
    groups = [Group(i, Task(f"t{i}", "fake", {}), [], 0) for i in range(4)]
    for n, (request, completion) in enumerate(zip(asked, done)):
        t = Trajectory()
        t.extend(list(request.tokens))
        t.extend(completion.tokens, logprobs=completion.logprobs, versions=completion.versions)
        t.score = Score(0.0)
        groups[n // 16].trajectories.append(t)
    return groups


@torch.no_grad()
def reverse_kl(loaded, teacher, b: Batch) -> float:
    """Exact, over the whole vocabulary, at every context in which the policy wrote."""
    total, count = 0.0, 0
    for sample in b.samples:
        tokens, at = torch.tensor(sample.tokens), torch.arange(len(sample.tokens))
        ours, theirs = (
            m.head.logits(m.hidden(tokens, at, PackedLayout([Segment(0, len(at))]))).double().log_softmax(-1)[sample.trainable - 1]
            for m in (loaded, teacher)
        )
        total, count = total + float((ours.exp() * (ours - theirs)).sum()), count + len(sample.trainable)
    return total / count


@pytest.mark.slow
def test_without_any_reward_the_reverse_kl_falls_and_falls():
    loaded, teacher = model(), load({"random": "llama", **SMALL, **KINDS["llama"], "seed": 5}, dtype="float32")
    opd = row("opd")
    t = trainer(loaded, opd, teacher=teacher, lr=2e-3, micro_tokens=600)
    seen, told = [], []
    for number in range(16):
        b = batch(rollouts(loaded, number), opd)
        seen.append(reverse_kl(loaded, teacher, b))
        stats = step(t, b, opd)
        assert stats.stepped
        told.append(stats.metrics["train/kl_teacher"])
    blocks = np.array(seen).reshape(4, 4).mean(1)
    assert (np.diff(blocks) < 0).all() and blocks[-1] < 0.6 * blocks[0], seen
    assert np.abs(np.array(told) - seen).max() < 0.5 * seen[0]  # the metric is its estimate from the drawn tokens


TEACHER = {"random": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algo__kind": "opd"}, "name one with model.teacher"),
        ({"model__teacher": TEACHER}, "model.teacher has no effect"),
        ({"algo__distill": {"coef": 0.1}}, "name one with model.teacher"),
    ],
)
def test_a_teacher_without_a_use_and_a_use_without_a_teacher_are_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        build(tiny(tmp_path, **changes)).close()


def test_a_run_learns_from_its_teacher(tmp_path):
    """A whole run, with the supervised phase before it: rewards are computed and reported, and only the teacher is learnt from."""
    run(tmp_path, algo__kind="opd", model__teacher=TEACHER, loop__steps=3)
    for event, number in zip(events(tmp_path, "StepDone")[-3:], store.steps(tmp_path)[-3:]):
        metrics, rows = event["metrics"], store.read_step(tmp_path, number)
        advantages = [a for r in rows for a, written in zip(r["advantages"], r["mask"]) if written]
        assert metrics["train/kl_teacher"] == pytest.approx(-np.mean(advantages), rel=1e-4)  # they are the teacher's alone
        assert np.std(advantages) > 0.05 and {r["reward"] for r in rows} <= {0.0, 1.0}
