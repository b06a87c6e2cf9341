"""algos/mixture.py: several rows in one step, each as if it were alone on its samples."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from kits.runs import events, run, tiny
from kits.train import awkward_groups, batch, model, row, step, trainer
from rondel.algos.mixture import Mixture
from rondel.assemble.components import build
from rondel.core.errors import UserError
from rondel.core.types import Group, Score, Trajectory
from rondel.driver.rollouts import prepare_of
from rondel.runtime.journal import store
from rondel.train.annotate import compute_advantages
from rondel.train.pack import TrainBatch
from rondel.train.step_metrics import StepMetricSums

TOLERANCE = 1e-6


def mixed() -> tuple[TrainBatch, Mixture]:
    """Groups 3, 7 and 12 are of the main stream, 8 of another environment with its own row, 11 are demonstrations."""
    groups = awkward_groups()
    b = batch(groups, row("grpo"))
    for s in b.samples:
        s.stream = {8: "code", 11: "books"}.get(s.group, "math")
    return b, Mixture(
        row("grpo"),
        {"code": (row("rloo", kl={"coef": 0.1}), 0.7), "books": (row("sft"), 0.2), "nobody": (row("sft"), 9.0)},
    )


def gradient(b: TrainBatch, algo, **settings) -> torch.Tensor:
    t = trainer(model(), row("grpo", kl={"coef": 0.1}), **settings)
    for r, _, share in b.split_by_row(algo):
        t._annotate(share, r.needs)
        compute_advantages(share, r)
    t.weights.zero_grad()
    for r, weight, share in b.split_by_row(algo):
        t._accumulate_gradients(share, r, StepMetricSums(), weight=weight, proximal_noted=False)
    return torch.cat([p.grad.flatten() for p in t.loaded.model.parameters()])


@pytest.mark.slow
def test_the_gradient_is_the_weighted_sum_of_each_row_on_its_own_samples():
    b, mixture = mixed()
    whole = gradient(b, mixture)
    alone = torch.zeros_like(whole)
    for algo, weight, share in mixed()[0].split_by_row(mixture):
        alone += weight * gradient(share, algo)
    assert (whole - alone).norm() <= TOLERANCE * whole.norm()


@pytest.mark.slow
def test_no_stream_changes_the_weight_of_another():
    """Denominators of one row do not see the samples of the others: without the demonstrations the
    rest is what it was.
    """
    b, mixture = mixed()
    rest = TrainBatch([s for s in b.samples if s.stream != "books"])
    shown = TrainBatch([s for s in b.samples if s.stream == "books"])
    together, apart = gradient(b, mixture), gradient(rest, mixture) + gradient(shown, mixture)
    assert (together - apart).norm() <= TOLERANCE * together.norm()


@pytest.mark.slow
@pytest.mark.parametrize("micro_tokens", [1, 25, 60])
def test_a_split_changes_nothing(micro_tokens):
    b, mixture = mixed()
    whole = gradient(b, mixture)
    assert (gradient(b, mixture, micro_tokens=micro_tokens) - whole).norm() <= TOLERANCE * whole.norm()


def test_a_whole_step_with_several_updates():
    b, mixture = mixed()
    stats = step(trainer(model(), row("grpo", kl={"coef": 0.1}), updates_per_step=2), b, mixture)
    assert stats.stepped and stats.metrics["train/tokens"] == b.total_tokens


BESIDE = {"kind": "sft", "weight": 0.2, "groups_per_step": 3}


@pytest.mark.slow
def test_a_run_trains_demonstrations_beside_its_rewards(tmp_path):
    """They are written down in no ledger and in no reward: only the gradient knows them."""
    parts = build(tiny(tmp_path / "a", algo__beside=[BESIDE]))
    try:
        assert isinstance(parts.algo, Mixture) and parts.algo.main is parts.row
        group = Group(17, parts.tasks.train[0], [], 0)
        made = [asyncio.run(prepare_of(parts)([group])).samples for _ in range(2)]
        other = asyncio.run(prepare_of(parts)([Group(18, group.task, [], 0)])).samples
    finally:
        parts.close()
    assert [s.tokens.tolist() for s in made[0]] == [s.tokens.tolist() for s in made[1]], (
        "a step done again must be shown the same"
    )
    assert len(made[0]) == 3 and [s.tokens.tolist() for s in made[0]] != [s.tokens.tolist() for s in other]
    run(tmp_path / "b", algo__beside=[BESIDE], loop__steps=3, loop__warmup__steps=0)
    for event in events(tmp_path / "b", "StepDone"):
        rows = store.read_step(tmp_path / "b", event["step"])
        shown = event["metrics"]["train/tokens"] - sum(sum(r["mask"]) for r in rows)
        assert len({r["group"] for r in rows}) == 4 and {r["policy"] for r in rows} == {"policy"}
        assert 3 * 2 <= shown <= 3 * 4  # three answers of a digit or two and the end of the turn


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ({"kind": "sft", "weight": -1.0}, "weight"),
        ({"kind": "grpo", "weight": 0.1}, "learns from rewards"),
        ({"kind": "sfd"}, "sft"),
        ({"kind": "sft", "data": {"kind": "digitz"}}, "digits"),
    ],
)
def test_a_component_that_cannot_be_is_refused(tmp_path, beside, says):
    with pytest.raises(UserError, match=says):
        build(tiny(tmp_path, algo__beside=[beside])).close()


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
MORE = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5, 10) for b in range(5)]
TWO = {
    "kind": "mix",
    "sources": [
        {"source": "sums", "kind": "list", "rows": SUMS, "holdout": 3},
        {"source": "twice", "kind": "list", "rows": MORE, "holdout": 3, "env": "kits.rehearsed_envs:twice"},
    ],
}


@pytest.mark.slow
def test_each_source_has_its_environment_its_row_and_its_numbers(tmp_path):
    own = {"twice": {"kind": "rloo", "weight": 0.5, "filters": ["signal"]}}
    parts = build(tiny(tmp_path / "a", task__data=TWO, algo__sources=own))
    try:
        assert (
            parts.algo.streams == {"twice": (parts.rows.of["twice"][0], 0.5)}
            and parts.rows.of["twice"][0].name == "rloo"
        )
        assert parts.env.turns == 1 and {t.env for t in parts.tasks.train} == {
            "single_turn",
            "kits.rehearsed_envs:twice",
        }
        alike = [Trajectory([1, 2], [False, True], score=Score(1.0)) for _ in range(4)]
        by_source = {t.data["source"]: t for t in parts.tasks.train}
        verdicts = {name: parts.judge(Group(0, task, alike, 0)) for name, task in by_source.items()}
    finally:
        parts.close()
    assert verdicts["sums"].keep and not verdicts["twice"].keep, "a group passes the filters of its own row"
    run(tmp_path / "b", task__data=TWO, algo__sources={"twice": {"kind": "rloo"}}, loop__steps=2)
    rows = store.read_step(tmp_path / "b", 4)
    assert {
        len([1 for a, b in pairwise([False, *r["mask"]]) if b and not a]) for r in rows if r["env"] != "single_turn"
    } == {2}
    [*_, last] = events(tmp_path / "b", "Evaluated")
    assert last["of"].keys() == {"sums", "twice"}
    assert {e["source"] for e in events(tmp_path / "b", "GroupFinished") if e["lengths"]} == {"sums", "twice"}


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"twise": {"kind": "rloo"}}, "twice"),
        ({"twice": {"weight": 0.5}}, "no kind"),
        ({"twice": {"kind": "rlo"}}, "rloo"),
        ({"twice": {"kind": "rloo", "weight": 0}}, "positive"),
        ({"twice": {"kind": "ppo"}}, "critic"),
        ({"twice": {"kind": "remax"}}, "greedy answer"),
        ({"twice": {"kind": "grpo", "surrogate": {"hihg": 0.3}}}, "high"),
        ({"twice": {"kind": "opd"}}, "opd learns from a teacher"),
    ],
)
def test_a_row_of_a_source_that_cannot_be_is_refused(tmp_path, sources, says):
    with pytest.raises(UserError, match=says):
        build(tiny(tmp_path, task__data=TWO, algo__sources=sources)).close()
