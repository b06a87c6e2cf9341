"""train/teacher_distributions.py: the reverse KL over the whole vocabulary, from
hidden states that were kept.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kits.distill import TEACHER, reverse_kl, rollouts
from kits.runs import events, run
from kits.sweeps import covering
from kits.train import KINDS, SMALL, awkward_groups, batch, model, row, step, trainer
from rondel.algos.divergence import Divergence
from rondel.core.errors import ConfigError
from rondel.models.head import LMHead
from rondel.models.load import load_model
from rondel.train import logprobs
from rondel.train.annotate import compute_advantages
from rondel.train.step_metrics import StepMetricSums
from rondel.train.teacher_distributions import TeacherDistribution, TeacherOpinion
from rondel.train.teachers import Teacher, TeacherEnsemble

FULL = {"distill": {"kind": "full", "coef": 1.0}}
TP, PP = ({"place__kind": "split", "place__mesh": {axis: 2}} for axis in ("tp", "pp"))


DIVERGENCES = [Divergence(0.0), Divergence(0.3), Divergence(1.0, 4), Divergence(0.3, 4, False), Divergence(0.0, 5)]


def naive_divergence(how: Divergence, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """By its definition, with every token of the support one by one; the choice of it takes no gradient.  [C, V] -> [C]."""
    out = []
    for a, b in zip(log_p, log_q):
        at = a.detach().argsort(descending=True)[: how.top] if how.top else torch.arange(len(a))
        p, q = a[at].exp(), b[at].exp()
        if how.top and how.tail:
            p, q = torch.cat([p, (1 - p.sum())[None]]), torch.cat([q, (1 - q.sum())[None]])
        elif how.top:
            p, q = p / p.sum(), q / q.sum()
        m = (1 - how.beta) * p + how.beta * q
        if how.beta in (0, 1):
            p, q = (p, q) if how.beta else (q, p)
            out.append((p * (p / q).log()).sum())
        else:
            out.append(how.beta * (q * (q / m).log()).sum() + (1 - how.beta) * (p * (p / m).log()).sum())
    return torch.stack(out)


@pytest.mark.parametrize("how", [Divergence(), *DIVERGENCES], ids=str)
def test_a_divergence_and_its_pull_on_the_logits(how):
    g = torch.Generator().manual_seed(3)
    z, log_q = torch.randn(2, 7, 11, generator=g, dtype=torch.float64)
    z, log_q = 2 * z.requires_grad_(), log_q.mul(2).log_softmax(-1)
    leaf = z.detach().requires_grad_()
    wanted = naive_divergence(how, leaf.log_softmax(-1), log_q)
    slope = torch.autograd.grad(wanted.sum(), leaf)[0]
    found, pull = how(leaf.detach().softmax(-1), log_q)
    assert (found - wanted).abs().max() <= 1e-10 and (pull - slope).abs().max() <= 1e-10
    same = how(log_q.exp(), log_q)
    assert all(x.abs().max() <= 1e-10 for x in same), "a policy that is its teacher is not pulled"


@pytest.mark.parametrize("how", DIVERGENCES, ids=str)
def test_the_trainer_takes_another_divergence_in_chunks(monkeypatch, how):
    monkeypatch.setattr(logprobs, "LOGITS", 3 * 29)
    g = torch.Generator().manual_seed(0)
    hidden, weight, kept = (torch.randn(n, 8, generator=g) for n in (11, 29, 11))
    target, pull, at = torch.randint(29, (11,), generator=g), torch.randn(11, generator=g), torch.arange(11)
    teacher = LMHead(torch.randn(29, 8, generator=g))
    taught = TeacherDistribution([TeacherOpinion(teacher, kept, at, torch.ones(11))], 0.7)
    h, H = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found = logprobs.logprob_entropy_and_kl(h, target, LMHead(weight), taught, temperature=0.7, apart_by=how)[2]
    (pull * found).sum().backward()
    ours, theirs = ((x @ w.double().T / 0.7).log_softmax(-1) for x, w in ((H, weight), (kept.double(), teacher.weight)))
    wanted = naive_divergence(how, ours, theirs)
    (pull.double() * wanted).sum().backward()
    assert torch.allclose(found.double(), wanted, atol=2e-5) and torch.allclose(h.grad.double(), H.grad, atol=2e-4)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_that_of_the_logits_in_value_and_gradient(monkeypatch, temperature, softcap):
    """Two teachers, one of which speaks of some tokens only, in chunks of three rows, against
    whole logits in float64.
    """
    monkeypatch.setattr(logprobs, "LOGITS", 3 * 29)
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(11, 8, generator=g), torch.randn(29, 8, generator=g)
    target, pull = torch.randint(29, (11,), generator=g), torch.randn(3, 11, generator=g)
    heads = [LMHead(torch.randn(29, width, generator=g), softcap=softcap) for width in (5, 7)]
    seen = [torch.arange(11), torch.tensor([1, 2, 6, 10])]
    kept = [torch.randn(len(at), head.weight.shape[1], generator=g) for at, head in zip(seen, heads)]
    share = [torch.where(torch.isin(seen[0], seen[1]), 0.25, 1.0), torch.full((4,), 0.75)]
    taught = TeacherDistribution([TeacherOpinion(*parts) for parts in zip(heads, kept, seen, share)], temperature)

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    told = logprobs.logprob_entropy_and_kl(h, target, LMHead(w, softcap=softcap), taught, temperature=temperature)
    sum((p * t).sum() for p, t in zip(pull, told)).backward()

    def logp(x, head):
        z = x.double() @ head.double().T
        return ((z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature).log_softmax(-1)

    H, W = hidden.double().requires_grad_(), weight.double().requires_grad_()
    ours, theirs = logp(H, W), torch.zeros(11, 29, dtype=torch.float64)
    for head, states, at, part in zip(heads, kept, seen, share):
        theirs[at] += part[:, None].double() * logp(states, head.weight)
    wanted = ours.gather(1, target[:, None])[:, 0], -(ours.exp() * ours).sum(-1), (ours.exp() * (ours - theirs)).sum(-1)
    sum((p.double() * t).sum() for p, t in zip(pull, wanted)).backward()
    for a, b in zip((*told, h.grad, w.grad), (*wanted, H.grad, W.grad)):
        assert torch.allclose(a.detach().double(), b.detach(), atol=2e-5), (a - b).abs().max()


def gradient(algo, b, teachers, **settings) -> torch.Tensor:
    t = trainer(model(), algo, teacher=teachers[0].loaded, **settings)
    t.teachers = TeacherEnsemble(teachers)
    t._annotate(b, algo.needs)
    compute_advantages(b, algo)
    t.weights.zero_grad()
    t._accumulate_gradients(b, algo, StepMetricSums(), proximal_noted=False)
    return torch.cat([p.grad.flatten() for p in t.loaded.model.parameters()])


def wise(seed: int):
    return load_model({"random": "llama", **SMALL, **KINDS["llama"], "seed": seed}, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"micro_tokens": 1}, {"micro_tokens": 25}, {"share_prompts": False}])
def test_no_split_changes_its_gradient_and_each_source_has_its_teacher(settings):
    algo, teachers = row("grpo", **FULL), [Teacher(wise(5), 2.0), Teacher(wise(6), 1.0, "code")]

    def made():
        b = batch(awkward_groups(), algo)
        for s in b.samples:
            s.stream = "code" if s.group in (8, 11) else "math"
        return b

    whole = gradient(algo, made(), teachers)
    assert (gradient(algo, made(), teachers, **settings) - whole).norm() <= 1e-6 * whole.norm()
    assert (gradient(algo, made(), teachers[:1]) - whole).norm() > 1e-3 * whole.norm(), "the second teacher is heard"


@pytest.mark.slow
def test_it_points_where_the_sampled_one_points_with_less_noise():
    """The mean gradient over many rollouts is the same; that of one batch strays less."""
    teachers, found = [Teacher(wise(5))], {"distill": [], "full": []}
    loaded = model()
    for number in range(8):
        groups = rollouts(loaded, number)
        for kind, rows in found.items():
            algo = row("opd", distill={"kind": kind, "coef": 1.0})
            rows.append(gradient(algo, batch(groups, algo), teachers, micro_tokens=600))
    drawn, whole = (torch.stack(rows) for rows in found.values())
    spread = [float((rows - rows.mean(0)).pow(2).sum(1).mean()) for rows in (drawn, whole)]
    assert spread[1] < 0.2 * spread[0], spread
    apart = (drawn.mean(0) - whole.mean(0)).norm() / whole.mean(0).norm()
    assert apart < 3 * (spread[0] / 8) ** 0.5 / whole.mean(0).norm(), apart


@pytest.mark.slow
def test_a_step_says_the_exact_distance_and_forgets_what_it_kept():
    loaded, algo = model(), row("opd", **FULL)
    b = batch(rollouts(loaded, 0), algo)
    t = trainer(loaded, algo, teacher=(teacher := wise(5)), lr=1e-3, epochs=2, updates_per_step=2)
    exact = reverse_kl(loaded, teacher, b)
    first = trainer(loaded, algo, teacher=teacher, lr=0.0)
    assert step(first, b, algo).metrics["train/kl_teacher"] == pytest.approx(exact, rel=1e-4)
    stats = step(t, b, algo)
    assert stats.stepped and stats.metrics["train/kl_teacher"] < exact and not any(s.hidden for s in b.samples)


@pytest.mark.slow
@pytest.mark.parametrize("place", covering([{}, TP, PP], [{}]), ids=str)
def test_a_run_comes_closer_to_its_teacher(tmp_path, place):
    run(
        tmp_path,
        algo__kind="opd",
        algo__distill={"kind": "full"},
        model__teacher=TEACHER,
        loop__warmup__steps=6,
        loop__steps=8,
        trainer__lr=3e-3,
        **place,
    )
    told = [e["metrics"]["train/kl_teacher"] for e in events(tmp_path, "StepDone")[-8:]]
    assert np.mean(told[-2:]) < 0.5 * np.mean(told[:2]), told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__teacher": [{"url": "http://127.0.0.1:1"}]}, "hidden states"),
        ({"engine__sampling__top_k": 5}, "top_k"),
        ({"trainer__memory__offload": True}, "offload"),
        ({"place__kind": "split", "place__cluster": "torchrun"}, "and not torchrun"),
        (
            {"place__kind": "split", "place__mesh": {"tp": 2}, "model__teacher": [{"context": "{prompt} {answer}"}]},
            "whole head of the policy",
        ),
        (
            {"place__kind": "split", "place__ranks": 2, "model__teacher": [{"context": "{prompt} {answer}"}]},
            "whole head of the policy",
        ),
    ],
)
def test_where_it_cannot_work_it_is_refused(tmp_path, changes, says):
    from kits.runs import tiny
    from rondel.assemble.components import build

    with pytest.raises(ConfigError, match=says):
        build(
            tiny(
                tmp_path,
                **{"algo__kind": "opd", "algo__distill": {"kind": "full"}, "model__teacher": TEACHER, **changes},
            )
        ).close()
