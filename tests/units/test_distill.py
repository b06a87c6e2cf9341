"""algos/distill.py: learning from a teacher on the policy's own samples lowers the reverse KL,
with no reward at all.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kits.distill import TEACHER, reverse_kl, rollouts
from kits.runs import events, run, tiny
from kits.train import KINDS, SMALL, batch, model, row, step, trainer
from rondel.algos.scored_samples import ScoredSamples
from rondel.assemble.components import build
from rondel.assemble.recipe_parts import sampling_of
from rondel.assemble.refusals import refuse_job
from rondel.assemble.rows import rows_of
from rondel.core.errors import ConfigError, RondelError, TrainError
from rondel.models.load import load_model
from rondel.runtime.journal import store
from rondel.train.annotate import advantages_of
from rondel.train.teachers import Teacher, TeacherEnsemble

V = 7


def test_its_expected_gradient_is_that_of_the_reverse_kl():
    """sum_v p_v·(-A_v)·∇log p_v = ∇KL(policy || teacher), with A_v = -(log p_v - log q_v)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(V, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(V, dtype=torch.float64, generator=generator).log_softmax(0)
    logp = logits.log_softmax(0)
    opd = row("opd")
    scored = ScoredSamples(
        torch.zeros(V), torch.arange(V), torch.ones(V, dtype=torch.int64), behavior_T=logp.detach(), teacher_T=teacher
    )
    advantages = advantages_of(opd, scored)
    ours = torch.autograd.grad((logp.detach().exp() * -advantages * logp).sum(), logits, retain_graph=True)[0]
    wanted = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)[0]
    assert torch.allclose(ours, wanted, atol=1e-12)


def test_a_reward_and_a_teacher_add_up_and_a_coefficient_of_zero_is_no_teacher():
    generator = torch.Generator().manual_seed(1)
    rewards, groups, lengths = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 1]), torch.tensor([2, 0, 3])
    behavior, teacher = torch.randn(5, generator=generator), torch.randn(5, generator=generator)
    scored = ScoredSamples(rewards, groups, lengths, behavior_T=behavior, teacher_T=teacher)
    plain, taught = row("grpo"), row("grpo", distill={"coef": 0.5})
    assert torch.allclose(advantages_of(taught, scored), advantages_of(plain, scored) - 0.5 * (behavior - teacher))
    assert torch.equal(advantages_of(row("grpo", distill={"coef": 0.0}), scored), advantages_of(plain, scored))
    assert "teacher_logprobs" in taught.needs and "teacher_logprobs" not in plain.needs


@pytest.mark.slow
@pytest.mark.sweep  # a run comes closer to its teacher in test_full_distill.py, whose gradient is this one's with less noise
def test_without_any_reward_the_reverse_kl_falls_and_falls():
    loaded, teacher = model(), load_model({"random": "llama", **SMALL, **KINDS["llama"], "seed": 5}, dtype="float32")
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


@pytest.mark.slow
def test_a_run_learns_from_its_teacher(tmp_path):
    """A whole run, with the supervised phase before it: rewards are computed and
    reported, and only the teacher is learnt from.
    """
    run(tmp_path, algo__kind="opd", model__teacher=TEACHER, loop__steps=3)
    for event, number in zip(events(tmp_path, "StepDone")[-3:], store.stored_steps(tmp_path)[-3:]):
        metrics, rows = event["metrics"], store.read_step(tmp_path, number)
        advantages = [a for r in rows for a, written in zip(r["advantages"], r["mask"]) if written]
        # they are the teacher's alone
        assert metrics["train/kl_teacher"] == pytest.approx(-np.mean(advantages), rel=1e-4)
        assert np.std(advantages) > 0.05 and {r["reward"] for r in rows} <= {0.0, 1.0}


# -- several teachers, and teachers elsewhere --------------------------------------------------------


def tables(*more: dict) -> list[dict]:
    return [{"path": TEACHER, **table} for table in more]


@pytest.mark.slow
def test_several_teachers_are_heard_by_their_weights_and_each_by_its_source():
    """log q = (w_1 log q_1 + w_2 log q_2) / (w_1 + w_2); whoever has a source speaks of its tasks alone."""
    loaded, opd = model(), row("opd")
    wise = [
        load_model({"random": "llama", **SMALL, **KINDS["llama"], "seed": seed}, dtype="float32") for seed in (5, 6, 7)
    ]
    alone = []
    for one in wise:
        b = batch(rollouts(loaded, 0), opd)
        trainer(loaded, opd, teacher=one)._annotate(b, opd.needs)
        alone.append([s.known.teacher.numpy() for s in b.samples])
    b = batch(rollouts(loaded, 0), opd)
    for s in b.samples:
        s.stream = "code" if s.group == 2 else "math"
    t = trainer(loaded, opd, teacher=wise[0])
    t.teachers = TeacherEnsemble([Teacher(wise[0], 3.0), Teacher(wise[1], 1.0), Teacher(wise[2], 4.0, "code")])
    t._annotate(b, opd.needs)
    for i, s in enumerate(b.samples):
        first, second, third = (told[i] for told in alone)
        wanted = (3 * first + second + 4 * third) / 8 if s.stream == "code" else (3 * first + second) / 4
        np.testing.assert_allclose(s.known.teacher.numpy(), wanted, atol=1e-6)
    t.teachers = TeacherEnsemble([Teacher(wise[2], 1.0, "code")])
    with pytest.raises(TrainError, match="no teacher of 'fake'"):
        t._annotate(batch(rollouts(loaded, 0), opd), opd.needs)


SOURCES = {
    "kind": "mix",
    "sources": [
        {
            "source": name,
            "kind": "list",
            "rows": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for b in range(10)],
            "holdout": 2,
        }
        for a, name in enumerate(("low", "high"))
    ],
}


@pytest.mark.slow
def test_each_source_learns_from_its_teacher_and_one_may_learn_from_none(tmp_path):
    teachers = tables({"source": "low"}, {"source": "low", "weight": 2.0})
    run(tmp_path, task__data=SOURCES, model__teacher=teachers, algo__sources={"low": {"kind": "opd"}}, loop__steps=2)
    rows = store.read_step(tmp_path, store.stored_steps(tmp_path)[-1])
    assert {r["group"] for r in rows} and events(tmp_path, "StepDone")[-1]["metrics"]["train/kl_teacher"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__teacher": tables({"source": "lwo"}), "algo__kind": "opd"}, "low"),
        (
            {"model__teacher": tables({"source": "low"}), "algo__kind": "opd"},
            "'high' learns from a teacher and has none",
        ),
        ({"model__teacher": tables({"url": "http://127.0.0.1:1"}), "algo__kind": "opd"}, "either a path"),
        ({"model__teacher": [{"weight": 1.0}], "algo__kind": "opd"}, "either a path"),
        ({"model__teacher": tables({"weight": 0.0}), "algo__kind": "opd"}, "weight"),
        ({"model__teacher": [{"url": "http://127.0.0.1:1"}], "algo__kind": "opd"}, "is a server running there"),
        (
            {
                "model__teacher": [{"url": "http://127.0.0.1:1"}],
                "algo__kind": "opd",
                "engine__sampling__temperature": 0.7,
            },
            "logprobs of temperature 1",
        ),
    ],
)
def test_teachers_that_cannot_teach_are_refused(tmp_path, changes, says):
    with pytest.raises(RondelError, match=says):
        build(tiny(tmp_path, task__data=SOURCES, **changes)).close()


@pytest.mark.slow
def test_a_teacher_that_is_served_teaches_what_it_would_teach_here(tmp_path):
    """`rondel serve` on another port and the same model in the trainer: the same advantages, and so the same run."""
    serve_kit = pytest.importorskip("kits.serve")
    run(tmp_path / "teacher", loop__steps=0, loop__warmup__steps=6)
    folder = tmp_path / "teacher" / "checkpoints" / "step-000006"
    how = {"algo__kind": "opd", "loop__steps": 2, "loop__warmup__steps": 1}
    run(tmp_path / "here", model__teacher=str(folder), **how)
    server = serve_kit.Server(folder, tmp_path)
    try:
        run(tmp_path / "there", model__teacher=[{"url": f"http://127.0.0.1:{server.port}"}], **how)
    finally:
        server.stop()
    here, there = (
        [e["metrics"]["train/kl_teacher"] for e in events(tmp_path / name, "StepDone")[-2:]]
        for name in ("here", "there")
    )
    assert there == pytest.approx(here, rel=1e-4) and min(here) > 0.01


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__teacher": TEACHER}, "one of random weights has none"),
        ({"model__teacher": [{"context": "{prompt} {answer}"}]}, "has no effect without a teacher that has a path"),
        ({"model__teacher": "runs/a", "trainer__memory__offload": True}, "leave one of them out"),
        (
            {"model__teacher": "runs/a", "place__kind": "split", "place__cluster": "torchrun"},
            "that the run makes itself",
        ),
    ],
)
def test_where_teachers_cannot_be_read_one_at_a_time(tmp_path, changes, says):
    job = tiny(tmp_path, **{"algo__kind": "opd", "trainer__memory__teachers": "one", **changes})
    with pytest.raises(ConfigError, match=says):
        refuse_job(job, rows_of(job), sampling_of(job))


@pytest.mark.parametrize(
    "changes",
    [
        {"algo__kind": "opd", "model__teacher": "runs/a", "trainer__memory__teachers": "one"},
        {
            "algo": {"kind": "cripo", "distill": {"criteria": {"form": 0}}},
            "model__teacher": [{"context": "{prompt} Mind the form."}],
        },
    ],
)
def test_teachers_read_and_hints_go_with_every_mesh(tmp_path, changes):
    """Their gradients are in tests/e2e/test_mesh.py."""
    for mesh in ({"tp": 2}, {"cp": 2}, {"pp": 2}, {"cp": 2, "tp": 2}):
        job = tiny(tmp_path, place__kind="split", place__mesh=mesh, **changes)
        refuse_job(job, rows_of(job), sampling_of(job))
