"""A policy that teaches itself: the same weights read more than the prompt, and judge the same answers."""

from __future__ import annotations

import math

import pytest
import torch

from kits.chat import tokenizer
from kits.runs import run
from kits.train import apart, gradient, model, row, trainer
from rondel.algos.distill import ScaledAdvantage
from rondel.algos.scored_samples import ScoredSamples
from rondel.core.config.model import TeacherConfig
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Group, Score, Task, Trajectory, Turn
from rondel.driver.teacher_prompts import write_teacher_prompts
from rondel.generate.template import Template
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.train.annotate import compute_advantages
from rondel.train.pack import batch_of
from rondel.train.teachers import Teacher

CONTEXT = "{prompt} It is {answer}."


def told_groups(seed: int = 0) -> list[Group]:
    """Three groups of ragged answers, some over two turns; each teacher's prompt differs in length from the policy's."""
    make, groups = torch.Generator().manual_seed(seed), []
    for g in range(3):
        prompt = torch.randint(5, 100, (4 + g,), generator=make).tolist()
        group = Group(g, Task(f"t{g}", "fake", {}), [], 0)
        for i in range(3):
            t = Trajectory()
            t.extend(prompt)
            for length in (3 + i, 2)[: 1 + i % 2]:
                if t.written:
                    t.extend(torch.randint(5, 100, (3,), generator=make).tolist())
                words = torch.randint(5, 100, (length,), generator=make).tolist()
                t.extend(words, logprobs=[-3.0] * length, versions=[0] * length)
            told = torch.randint(5, 100, (6 + i,), generator=make).tolist()
            t.teacher_prompts = [None if (g, i) == (1, 1) else prompt[:2] + told]
            t.score = Score(float(i == g))
            group.trajectories.append(t)
        groups.append(group)
    return groups


def self_taught(loaded, algo, **how):
    t = trainer(loaded, algo, **how)
    with_policy = [Teacher(None, is_policy=True)]
    return type(t)(loaded, t.main, run=t._device, needs=algo.needs, teachers=with_policy)


@torch.no_grad()
def log_dist(loaded, tokens: list[int]) -> torch.Tensor:
    """log p of every word behind each token.  [t, V]."""
    layout = PackedLayout([PackedSegment(0, len(tokens))])
    return loaded.head.logits(
        loaded.hidden_states(torch.tensor(tokens), torch.arange(len(tokens)), layout)
    ).log_softmax(-1)


def as_read(t: Trajectory) -> tuple[list[int], list[int]]:
    """What the teacher reads, and where the policy wrote in it."""
    first = t.mask.index(True)
    prompt = t.teacher_prompts[0] or list(t.tokens[:first])
    written = [i - first + len(prompt) for i, mine in enumerate(t.mask) if mine]
    return [*prompt, *t.tokens[first:]], written


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("micro_tokens", [1, 30, 10**6])
def test_the_policy_reads_the_context_and_scores_the_same_answer(micro_tokens, share):
    loaded, algo, groups = model(), row("sdpo"), told_groups()
    t, b = self_taught(loaded, algo, micro_tokens=micro_tokens, share_prompts=share), batch_of(groups)
    before = [s.tokens.copy() for s in b.samples]
    t._annotate(b, algo.needs)
    for s, kept, x in zip(b.samples, before, [x for g in groups for x in g.trajectories], strict=True):
        tokens, written = as_read(x)
        dist = log_dist(t.loaded, tokens)
        wanted = torch.stack([dist[i - 1, tokens[i]] for i in written])
        assert torch.allclose(s.known.teacher, wanted, atol=1e-5)
        assert (s.tokens == kept).all(), "the policy's own context stays"
    compute_advantages(b, algo)
    known = b.tokens()
    assert torch.allclose(known.advantages, known.teacher - known.behavior, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opsd", "sdft"])
def test_whole_distributions_are_compared_with_what_it_would_have_said(kind):
    """The gradient against autograd through written-out logits: only the policy's side has one."""
    loaded, algo, groups = model(), row(kind), told_groups()
    t, b = self_taught(loaded, algo), batch_of(groups)
    whole = gradient(t, b, algo)
    for micro_tokens, share in ((1, True), (40, False)):
        assert apart(gradient(t, b, algo, micro_tokens=micro_tokens, share=share), whole) <= 1e-5
    t.weights.zero_grad()
    total = torch.zeros(())
    for s, x in zip(b.samples, [x for g in groups for x in g.trajectories], strict=True):
        tokens, written = as_read(x)
        log_q = log_dist(t.loaded, tokens)[torch.tensor(written) - 1]
        ids, layout = torch.tensor(s.tokens.tolist()), PackedLayout([PackedSegment(0, len(s.tokens))])
        log_p = t.loaded.head.logits(t.loaded.hidden_states(ids, torch.arange(len(ids)), layout)).log_softmax(-1)
        log_p = log_p[s.trainable - 1]
        if kind == "sdft":
            at = log_p.detach().topk(100, -1).indices
            log_p, log_q = (x_.gather(-1, at).log_softmax(-1) for x_ in (log_p, log_q))
            log_m = ((log_p.exp() + log_q.exp()) / 2).log()
            kl = ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)) / 2
        else:
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        total = total + kl.sum() / b.total_tokens
    total.backward()
    wanted = torch.cat([m.grad.flatten() for m in t.weights.masters]).double()
    assert wanted.norm() > 1e-4 and apart(whole, wanted) <= 1e-3


def test_rlsd_takes_the_direction_from_the_reward_and_the_size_from_the_teacher():
    """As ms-swift has it: A·((1 - lam) + lam·clip(exp(sign(A)·gap), 1 - eps, 1 + eps)); written out for six tokens."""
    advantage = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, 0.0], dtype=torch.float64)
    gap = torch.tensor([0.1, 2.0, -0.1, 0.1, -3.0, 1.0], dtype=torch.float64)
    scored = ScoredSamples(
        torch.zeros(6), torch.arange(6), torch.ones(6, dtype=torch.int64),
        behavior_T=torch.full((6,), -2.0, dtype=torch.float64), teacher_T=gap - 2.0,
    )  # fmt: skip
    found = ScaledAdvantage(0.5, 0.2).shape_advantages(advantage, scored)
    factors = [math.exp(0.1), 1.2, math.exp(-0.1), math.exp(-0.1), 1.2, 1.0]
    wanted = [a * (0.5 + 0.5 * f) for a, f in zip(advantage.tolist(), factors, strict=True)]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-12)
    assert (found.sign() == advantage.sign()).all()
    bad = ScaledAdvantage(1.0, 0.2, only_negative=True).shape_advantages(advantage, scored)
    assert torch.equal(bad[:3], advantage[:3]) and bad[4] == pytest.approx(-0.6)
    assert torch.equal(ScaledAdvantage(0.0).shape_advantages(advantage, scored), advantage)
    for knobs, says in (({"coef": 1.5}, "a share of"), ({"clip": 1.0}, "stay positive")):
        with pytest.raises(ConfigError, match=says):
            ScaledAdvantage(**knobs)


# -- what it reads
# ----------------------------------------------------------------------------------------------


def asked(template: Template, text: str, *answers: tuple[str, float], **data: str) -> Group:
    group = Group(0, Task("t", "single_turn", {"prompt": text, **data}), [], 0)
    for answer, reward in answers:
        t, messages = Trajectory(), [{"role": "user", "content": text}]
        t.extend(template.render_opening(messages))
        t.conversation = [Turn("user", text, 0, len(t.tokens))]
        words = template.tokenizer(answer, add_special_tokens=False)["input_ids"]
        t.extend(words, logprobs=[-1.0] * len(words), versions=[0] * len(words))
        t.text, t.score = answer, Score(reward)
        group.trajectories.append(t)
    return group


def test_a_context_takes_the_place_of_the_last_message():
    template = Template(tokenizer(), None)
    group = asked(template, "3 + 4 =", ("8", 0.0), ("7", 1.0), answer="7")
    contexts = [None, CONTEXT, "{prompt}\n\nSomebody wrote: {solution}"]
    write_teacher_prompts(group, contexts, template, 4096)

    def opening(text: str) -> list[int]:
        return list(template.render_opening([{"role": "user", "content": text}]))

    wrong, right = (t.teacher_prompts for t in group.trajectories)
    assert wrong == [None, opening("3 + 4 = It is 7."), opening("3 + 4 =\n\nSomebody wrote: 7")]
    assert right == [None, opening("3 + 4 = It is 7."), None], "no other answer is above the mean"
    with pytest.raises(DataError, match=r"names \{answer\}, and task t has no such field"):
        write_teacher_prompts(asked(template, "3 + 4 =", ("8", 0.0)), contexts, template, 4096)
    with pytest.raises(DataError, match="a teacher would read"):
        write_teacher_prompts(group, contexts, template, 8)
    group.trajectories[0].conversation.clear()
    with pytest.raises(ConfigError, match="begins with more than plain messages"):
        write_teacher_prompts(group, contexts, template, 4096)


@pytest.mark.parametrize(
    "teacher,says",
    [
        ({"context": "{prompt} {answer"}, "context = "),
        ({"context": "{prompt}"}, "tells nothing of the task"),
        ({"context": "{answer.upper}"}, "is no name of a field"),
        ({"context": CONTEXT, "url": "http://127.0.0.1:1"}, "reads it here"),
        ({}, "the policy itself teaches with a context alone"),
    ],
)
def test_a_context_that_cannot_be_is_refused(teacher, says):
    with pytest.raises(ValueError, match=says):
        TeacherConfig(**teacher)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opsd", "rlsd"])
def test_a_run_teaches_itself_and_stores_what_its_teacher_read(tmp_path, kind):
    run(tmp_path, algo__kind=kind, model__teacher=[{"context": CONTEXT}], loop__steps=2)
    groups = store.groups_of(store.read_step(tmp_path, 5))
    found = [t for g in groups for t in g.trajectories if t.written]
    assert found and all(len(t.teacher_prompts) == 1 and t.teacher_prompts[0] for t in found)
    assert all(len(t.teacher_prompts[0]) > t.mask.index(True) for t in found)


def test_where_it_cannot_work_it_is_refused(tmp_path):
    for how, says in (
        ({"model__teacher": [{"context": CONTEXT}], "loop__updates_per_step": 2}, "which the first update moves"),
        ({"model__teacher": {"context": CONTEXT}}, "is one of a list"),
        ({}, "let the policy teach itself"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(tmp_path, algo__kind="opsd", **how)
