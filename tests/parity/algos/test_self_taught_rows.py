"""Rows that learn from what the policy wrote and from nothing else: OPSA lowers the least likely tokens, SSD learns
truncated samples as they are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kits.algos import Ragged, near, tensor, tokens
from kits.engine import drawn_groups
from kits.engine import tiny as tiny_model
from kits.runs import FLOW, run, tiny
from kits.train import apart, gradient, row, step, trainer
from rondel.algos import table
from rondel.algos.least_likely import LeastLikely
from rondel.algos.table import resolve_algorithm
from rondel.assemble.recipe_parts import sampling_of
from rondel.assemble.rows import rows_of
from rondel.assemble.workers import settings_of
from rondel.core.errors import ConfigError
from rondel.core.types import KEEP, Group, Task, Trajectory, Verdict
from rondel.filter.stub import stub
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.train.pack import batch_of


def test_opsa_lowers_the_least_likely_tokens_most_where_they_were_least_decided():
    """Eight tokens, a quarter of them chosen: the weights run from 0.5 to 1 with the entropy; ties go together."""
    logp, nats = tensor(-1, -9, -2, -8, -3, -1, -7, -1), tensor(5, 1, 5, 3, 5, 5, 2, 5)
    seen = tokens(logp, tensor(*[0.0] * 8), tensor(*[-1.0] * 8), entropy=nats)
    assert near(LeastLikely(0.25).weights_of(seen), [0, 0.5, 0, 1.0, 0, 0, 0, 0])
    assert near(LeastLikely(0.4).weights_of(seen), [0, 0.5, 0, 1.0, 0, 0, 0.75, 0])  # 0.4·8 rounded down
    assert near(LeastLikely(0.01, 0.5, 0.5).weights_of(seen), [0, 0.5, 0, 0, 0, 0, 0, 0])  # at least one, and flat
    tied = replace(seen, logprobs=tensor(-1, -9, -2, -9, -3, -1, -9, -1))
    assert near(LeastLikely(0.125).weights_of(tied), [0, 0.5, 0, 1.0, 0, 0, 0.75, 0])
    flat = replace(seen, entropy=tensor(*[2.0] * 8))
    assert near(LeastLikely(0.25).weights_of(flat), [0, 1.0, 0, 1.0, 0, 0, 0, 0])  # one entropy: all weigh most


def test_opsa_counts_what_it_chose_and_pushes_it_down():
    batch = Ragged.make([3, 4, 5, 0, 2], 11)
    chosen = table.OPSA.correction.share * 14
    _, slope, _ = batch.loss(table.OPSA)
    moved = slope[:, 0].nonzero()[:, 0]
    assert len(moved) == int(chosen) == 2 and set(moved.tolist()) == set(batch.others_3T[0].argsort()[:2].tolist())
    p_T, old_T = batch.logits_TV.log_softmax(-1)[:, 0].exp(), batch.others_3T[0]
    ratio = (p_T.log() - old_T).exp()
    free = moved[(ratio >= 0.8)[moved]]  # a bad token far below the anchor is held by the clip
    assert len(free) and bool((slope[free, 0] > 0).all()), "descent lowers the logit of the drawn token"
    heaviest = (ratio * (1 - p_T))[free] / 2  # at weight 1, over the two that count
    assert bool((slope[free, 0] <= heaviest + 1e-12).all() and (slope[free, 0] >= heaviest / 2 - 1e-12).all())


@pytest.mark.slow
def test_ssd_learns_the_models_own_distribution():
    """The gradient of a step on samples of temperature 0.7 and top-k 4 is that of plain cross-entropy, written out."""
    loaded, algo = tiny_model(), row("ssd")
    b = batch_of(drawn_groups(loaded, temperature=0.7, top_k=4))
    assert any(s.support is not None for s in b.samples), "the engine tells what it cut"
    t = trainer(loaded, algo)
    t._precompute_update(b, algo, [b], set())
    found = gradient(t, b, algo)
    t.weights.zero_grad()
    total = torch.zeros(())
    for s in b.samples:
        ids, layout = torch.tensor(s.tokens.tolist()), PackedLayout([PackedSegment(0, len(s.tokens))])
        logits = t.loaded.head.logits(t.loaded.hidden_states(ids, torch.arange(len(ids)), layout))
        total = total + torch.nn.functional.cross_entropy(logits[s.trainable - 1], ids[s.trainable], reduction="sum")
    (total / b.total_tokens).backward()
    wanted = torch.cat([m.grad.flatten() for m in t.weights.masters]).double()
    assert wanted.norm() > 1e-3 and apart(found, wanted) <= 1e-5
    assert step(t, b, algo).metrics["train/loss"] == pytest.approx(float(total.detach() / b.total_tokens), rel=1e-5)


def test_the_trainer_of_ssd_computes_at_temperature_1(tmp_path):
    def temperature(kind: str) -> float:
        job = tiny(tmp_path, algo__kind=kind, engine__sampling__temperature=0.6)
        whole = "whole_distribution" in rows_of(job).needs
        settings = settings_of(job, sampling_of(job), 64, replay_routes=False, mismatch_bound=1e-2, whole=whole)
        return settings.temperature

    assert temperature("ssd") == 1.0 and temperature("raft") == 0.6


def test_ssd_leaves_out_answers_that_say_nothing():
    def verdict(*answers: str) -> Verdict:
        trajectories = []
        for text in answers:
            t = Trajectory(text=text)
            t.extend([5], logprobs=[-1.0], versions=[0])
            trajectories.append(t)
        return stub(Group(0, Task("t", "fake", {}), trajectories, 0))

    assert verdict("") == verdict("  \n ") == verdict("pass", "x = 1") == Verdict(False, "stub")
    assert verdict("a\nb") == verdict("return x + 1") == verdict("", "return x + 1") == KEEP
    assert stub(Group(0, Task("t", "fake", {}), [], 0)) == KEEP


@pytest.mark.parametrize(
    "section,message",
    [
        ({"kind": "opsa", "kl": {"coef": 0.1}}, r"algo\.kl\.coef = 0\.1 beside correction\.kind = 'least_likely'"),
        ({"kind": "opsa", "distill": {"coef": 0.1}}, r"Set algo\.distill\.coef = 0"),
        ({"kind": "opsa", "advantage": {"kind": "group_norm"}}, r"set algo\.advantage = \{ kind = 'constant'"),
        ({"kind": "opsa", "advantage": {"value": 1.0}}, "lowers the least likely tokens"),
        ({"kind": "opsa", "correction": {"share": 0.0}}, r"it must lie in \(0, 1\]"),
        ({"kind": "opsa", "correction": {"least": 2.0}}, "0 < least <= most"),
        ({"kind": "ssd", "correction": {"kind": "importance"}}, "temperature 1. Remove algo.correction"),
        ({"kind": "ssd", "kl": {"coef": 0.1}}, "temperature 1. Remove algo.kl"),
        ({"kind": "ssd", "ratio": {"kind": "sequence"}}, r"algo\.ratio = .* has no effect"),
    ],
)
def test_what_does_not_go_with_them_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm(section)


def test_a_row_of_the_samplers_distribution_does_not_stand_beside_ssd(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'ssd' learns the model's own distribution .* and 'raft' that of the sampler"
    ):
        run(
            tmp_path,
            algo={"kind": "ssd", "sources": {"a": {"kind": "raft"}}},
            engine__sampling__temperature=0.6,
        )


def test_a_flow_has_no_vocabulary_to_learn(tmp_path):
    with pytest.raises(ConfigError, match="'ssd' needs the whole vocabulary at temperature 1"):
        run(tmp_path, recipe=FLOW, algo__kind="ssd")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algo": {"kind": "opsa"}},
        {
            "algo": {"kind": "ssd"},
            "engine__sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 8},
        },
    ],
    ids=["opsa", "ssd"],
)
def test_a_tiny_run_moves_the_weights(tmp_path, changes):
    card = run(tmp_path, loop__steps=2, loop__warmup__steps=2, **changes)
    assert card["steps"] == 4 and store.stored_steps(tmp_path)
