"""Law 3, split: the gradient is the same for any micro-batch size, packing order, rank count and permutation of the
groups. Denominators are counted over the whole batch before the first forward pass.

First of the trainer, then of the formulas alone. Two ranks are in tests/e2e/test_ranks.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kits import algos
from kits.algos import AGGREGATES, FORMULAS_ONLY, SPLIT_ROWS, Ragged, lively, relative_difference, rows
from kits.blocks import block_model, unmasked_groups
from kits.flows import FLOWS, drawn_groups, flow
from kits.sweeps import covering
from kits.train import (
    apart,
    awkward_groups,
    batch,
    bits,
    forked_group,
    gradient,
    make_stale,
    model,
    row,
    shuffled,
    step,
    trainer,
)
from rondel.algos import aggregate, correction, table
from rondel.algos.advantage import Constant
from rondel.algos.component import Component
from rondel.algos.surrogate import Clip
from rondel.algos.table import TABLE
from rondel.core.types import Score, Trajectory
from rondel.train.annotate import advantages_of, compute_advantages
from rondel.train.pack import TrainBatch, batch_of, micro_batches
from rondel.train.step_metrics import StepMetricSums

TOLERANCE = 1e-6
ROWS = {
    "grpo": row("grpo"),
    "grpo, k3 and entropy": row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02}),
    "dr_grpo": row("dr_grpo"),
    "dapo": row("dapo"),
    "rloo": row("rloo"),
    "ppo": row("ppo", kl={"coef": 0.1}),
    "reinforce_pp": row("reinforce_pp", advantage={"gamma": 0.9}, kl={"coef": 0.1}),
    "reinforce": row("reinforce", correction={"kind": "importance"}),
    "sft": row("sft"),
}
WHOLE = {
    "a bound chosen from all weights": row("reinforce", correction={"kind": "importance", "high": "auto"}),
    "normalised": row(
        "grpo", correction={"kind": "importance", "normalize": "token"}, entropy={"coef": 0.02, "top": 0.4}
    ),
    "clip_cov": row("clip_cov", surrogate={"share": 0.1, "least": 0.05}),
}


FEW = ["grpo, k3 and entropy", "ppo", "reinforce"]  # a reference, a critic, a correction: rows for the other models
CASES = [  # the plain rows of the table are in `test_every_row...`, stale and with all their parts alive
    *(("llama", name) for name in ("grpo", "reinforce_pp", *FEW)),
    *((kind, name) for kind in ("tied", "qwen3", "gemma3_text") for name in FEW),
]


CHOSEN = [  # every row, and a model of each kind of attention; the tied one is held to the formula below, and split for its critic
    *(("llama", name) for name in ("grpo", "reinforce_pp", "ppo")),
    *[("qwen3", "reinforce"), ("gemma3_text", "grpo, k3 and entropy")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), covering(CASES, CHOSEN, fast=[("llama", "grpo")]))
def test_the_gradient_is_the_same_for_any_split(kind, name):
    algo = ROWS[name]
    t = trainer(model(kind), algo)
    b = batch(awkward_groups(), algo)
    whole = gradient(t, b, algo)
    assert whole.norm() > 1e-3
    worst = 0.0
    every = (kind, name) == ("llama", "ppo")  # another row or model changes nothing of how they cross
    for micro_tokens, share in ((1, True), (13, False), (40, True), (10**6, False)):
        if every or micro_tokens in (13, 40):
            worst = max(worst, apart(gradient(t, b, algo, micro_tokens=micro_tokens, share=share), whole))
    for seed, whole_groups in ((0, True), (2, False)) if every else ((2, False),):
        worst = max(
            worst, apart(gradient(t, shuffled(b, seed, whole_groups=whole_groups), algo, micro_tokens=25), whole)
        )
    print(f"{kind}, {name}: relative difference {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("kind", ["k3", "closed_form"])
@pytest.mark.parametrize(
    "drawn", ["points", *(pytest.param(name, marks=pytest.mark.slow) for name in FLOWS if name != "points")]
)
def test_the_gradient_over_points_is_the_same_for_any_split(drawn, kind):
    """Of points, images and videos, by a policy that has left its reference and what drew the chains."""
    algo = row("flow_grpo", kl={"coef": 0.1, "kind": kind}, surrogate={"low": 0.5, "high": 0.5})
    loaded = flow(**FLOWS[drawn])
    t, b = trainer(loaded, algo), batch(drawn_groups(loaded, [[1, 9, 2], [4], [5, 5, 1], [7, 3]]), algo)
    with torch.no_grad():
        loaded.model.leave.weight.mul_(1.1)
    whole = gradient(t, b, algo)
    assert whole.norm() > 1e-3 and apart(gradient(t, b, replace(algo, kl=replace(algo.kl, coef=0.0))), whole) > 1e-3
    cuts = [gradient(t, b, algo, micro_tokens=n) for n in (1, 13, 40)]
    cuts += [gradient(t, shuffled(b, seed, whole_groups=not seed), algo, micro_tokens=25) for seed in (0, 1)]
    assert max(apart(cut, whole) for cut in cuts) <= TOLERANCE


@pytest.mark.parametrize("kind", ["choices", "numbers", "chunks"])
def test_the_gradient_over_actions_is_the_same_for_any_split(kind):
    """Of policy and critic, of episodes of which some were cut off: their values are part of the returns."""
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")
    from kits.control import POLICIES, acted_groups

    algo = row("ppo", value={"clip": math.inf}, shaping={"kind": "none"}, entropy={"coef": 0.02})
    loaded = POLICIES[kind]()
    t, b = trainer(loaded, algo), batch(acted_groups(loaded), algo)
    torch.nn.init.normal_(t.critic.loaded.model.act.weight, generator=torch.Generator().manual_seed(0))

    def both(b: TrainBatch, micro_tokens: int) -> torch.Tensor:
        own = gradient(t, b, algo, micro_tokens=micro_tokens)
        t.critic.accumulate_gradients(b, algo, t.settings, StepMetricSums())
        return torch.cat([own, *(m.grad.double().flatten() for m in t.critic.weights.masters)])

    whole = both(b, 10**6)
    assert whole.norm() > 1e-3 and any(s.value_after for s in b.samples)
    cuts = [both(b, n) for n in (1, 13, 40)]
    cuts += [both(shuffled(b, seed, whole_groups=not seed), 25) for seed in (0, 1)]
    assert max(apart(cut, whole) for cut in cuts) <= TOLERANCE


def test_the_gradient_over_transitions_is_the_same_for_any_split():
    """Of a learned model of a world, by likelihood."""
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")
    from kits.worlds import learned_groups, world_model

    algo, loaded = row("sft"), world_model()
    t, b = trainer(loaded, algo), batch(learned_groups(loaded), algo)
    whole = gradient(t, b, algo)
    assert whole.norm() > 1e-3
    cuts = [gradient(t, b, algo, micro_tokens=n) for n in (1, 13, 40)]
    cuts += [gradient(t, shuffled(b, seed, whole_groups=not seed), algo, micro_tokens=25) for seed in (0, 1)]
    assert max(apart(cut, whole) for cut in cuts) <= TOLERANCE


@pytest.mark.slow
def test_the_gradient_over_blocks_is_the_same_for_any_split():
    """A demonstration among them, with entropy and a reference."""
    algo = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
    t, b = trainer(block_model(), algo), batch(unmasked_groups(), algo)
    whole = gradient(t, b, algo)
    assert whole.norm() > 1e-3
    cuts = [
        gradient(t, b, algo, micro_tokens=1),
        gradient(t, shuffled(b, 0, whole_groups=False), algo, micro_tokens=40),
    ]
    assert max(apart(cut, whole) for cut in cuts) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", covering(["llama", "qwen3", "gemma3_text"], {"gemma3_text"})
)  # windows beside whole layers
def test_groups_that_begin_alike_share_it_and_keep_the_gradient(kind):
    """Two system messages over the awkward groups: each is computed once a micro-batch,
    forward and backward, and changes nothing.
    """
    rng, groups = np.random.default_rng(5), awkward_groups()
    systems = [rng.integers(5, 100, 20).tolist(), rng.integers(5, 100, 33).tolist()]
    for number, group in enumerate(groups):
        for x in group.trajectories:
            front = Trajectory()
            front.extend(systems[number % 2])
            for name in ("tokens", "mask", "logprobs", "versions"):
                setattr(x, name, getattr(front, name) + getattr(x, name))
    t = trainer(model(kind), ROWS["grpo"])
    b = batch(groups, ROWS["grpo"])
    whole = gradient(t, b, ROWS["grpo"], share=False)
    assert whole.norm() > 1e-3
    once, apart_each = (sum(len(p.tokens) for p in micro_batches(b, 10**6, share=share)) for share in (True, False))
    assert once < apart_each - 3 * 20 - 2 * 33
    for micro_tokens in (60, 150):
        assert apart(gradient(t, b, ROWS["grpo"], micro_tokens=micro_tokens), whole) <= TOLERANCE
        assert (
            apart(
                gradient(t, shuffled(b, micro_tokens, whole_groups=True), ROWS["grpo"], micro_tokens=micro_tokens),
                whole,
            )
            <= TOLERANCE
        )


def test_siblings_that_were_routed_otherwise_keep_their_routes():
    """A group that began under one version and went on under the next: every answer is replayed through the experts
    that its own prompt had, whoever is packed beside it, and branches of an episode likewise.
    """
    t = trainer(model("mixture"), ROWS["grpo"], replay_routes=True)
    rng, groups = np.random.default_rng(2), [*awkward_groups(), forked_group(number=20)]
    for x in (x for group in groups for x in group.trajectories):
        x.experts = rng.permuted(np.tile(np.arange(4), (len(x.tokens) - 1, t.loaded.routers, 1)), axis=-1)[..., :2]
    for first, second in (group.trajectories[:2] for group in groups[2:4]):
        second.experts[:4] = first.experts[:4]  # the beginning of these two has the same routes
    b = batch(groups, ROWS["grpo"])
    whole = gradient(t, b, ROWS["grpo"], share=False)
    assert whole.norm() > 1e-3
    for micro_tokens in (40, 10**6):
        assert apart(gradient(t, b, ROWS["grpo"], micro_tokens=micro_tokens), whole) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", covering([name for name in TABLE if name not in FORMULAS_ONLY], SPLIT_ROWS))
def test_every_row_is_the_same_for_any_split_of_a_stale_batch(name):
    """Proximal and behavior lie elsewhere than the policy, some samples are
    demonstrations, and some tokens are singled out.
    """
    algo, rng = lively(TABLE[name]), np.random.default_rng(0)
    groups = awkward_groups()
    for x in (x for g in groups for x in g.trajectories):
        right, form = float(rng.integers(2)), float(rng.integers(3))
        x.score = Score(x.reward + 0.7, {"right": right, "form": form, "half": form / 2})
    t, b = trainer(model("shallow"), algo, teacher=model("tied")), batch_of(groups)
    for s in b.samples:
        s.baseline = 0.1 * s.group  # of the greedy answer beside the group
    t._annotate(b, algo.needs | {"proximal_logprobs"})
    compute_advantages(b, algo)
    make_stale(b, rng)
    whole = gradient(t, b, algo, noted=True)
    assert whole.norm() > 1e-3
    assert apart(gradient(t, b, algo, micro_tokens=30, share=False, noted=True), whole) <= TOLERANCE
    mixed = shuffled(b, 1, whole_groups=False)
    assert apart(gradient(t, mixed, algo, micro_tokens=25, noted=True), whole) <= TOLERANCE


TOKEN_ALIKE = [name for name, algo in ROWS.items() if not getattr(algo.advantage, "per_token", False)]


@pytest.mark.parametrize(
    ("kind", "name"),
    covering(
        [(kind, name) for kind in ("llama", "tied", "gemma3_text") for name in TOKEN_ALIKE],
        [
            *(("llama", name) for name in TOKEN_ALIKE if name not in FEW),
            *[("tied", "reinforce"), ("gemma3_text", "grpo, k3 and entropy")],
        ],
        fast=[("llama", name) for name in TOKEN_ALIKE],
    ),
)
def test_the_gradient_is_that_of_the_formula(kind, name):
    """One sample at a time through the plain transformers model, the loss written out by hand in float64."""
    algo, groups = ROWS[name], awkward_groups()
    loaded = model(kind)
    t = trainer(loaded, algo)
    b = batch(groups, algo)
    mine = gradient(t, b, algo, micro_tokens=30)
    plain = AutoModelForCausalLM.from_config(loaded.model.config, attn_implementation="eager")
    plain.load_state_dict(loaded.model.state_dict())
    plain = plain.double().eval()
    lengths = np.array([len(s.trainable) for s in b.samples])
    by_group = {g.id: np.array([x.reward for x in g.trajectories]) for g in groups}
    loss = 0.0
    for s in b.samples:
        rewards = by_group[s.group]
        if name == "dapo":  # max_tokens = 8 and a buffer of 8 // 5 = 1: an answer of 8 tokens or more pays 1
            rewards = np.array([x.reward - (len(x.trainable) >= 8) for x in b.samples if x.group == s.group])
        r, n = rewards[s.index], len(rewards)
        group_norm = (r - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if n > 1 else 0.0
        advantage = {
            "grpo": group_norm,
            "dapo": group_norm,
            "dr_grpo": r - rewards.mean(),
            "rloo": r - (rewards.sum() - r) / (n - 1) if n > 1 else 0.0,
            "reinforce": r,
            "sft": 1.0,
        }[algo.name]
        weight = {
            "grpo": 1 / (len(lengths) * len(s.trainable)),
            "dr_grpo": 1 / (len(lengths) * 8),
            "dapo": 1 / lengths.sum(),
            "rloo": 1 / len(lengths),
            "reinforce": 1 / len(lengths),
            "sft": 1 / lengths.sum(),
        }[algo.name]
        logits = plain(torch.tensor(s.tokens)[None], use_cache=False).logits[0].double()
        logp = logits.log_softmax(-1)
        at = torch.tensor(s.trainable)
        picked = logp[at - 1].gather(1, torch.tensor(s.tokens)[at][:, None])[:, 0]
        correction = 1.0
        if name == "reinforce":
            correction = (picked.detach() - torch.tensor(s.known.behavior.numpy())).exp().clamp(max=2.0)
        token = -correction * advantage * picked
        if name == "grpo, k3 and entropy":  # the reference is the policy itself, so k3 has gradient 0 here
            entropy = -(logp.exp() * logp).sum(-1)[at - 1]
            token = token - 0.02 * entropy
        loss = loss + weight * token.sum()
    loss.backward()
    theirs = dict(plain.named_parameters())
    exact = torch.cat(
        [
            theirs[n].grad.flatten() if theirs[n].grad is not None else torch.zeros(theirs[n].numel())
            for n in t.weights.names
        ]
    )
    assert apart(mine, exact) <= 1e-5, apart(mine, exact)


MOVES = ["grpo", "grpo, k3 and entropy", "dapo", "sft", "normalised", "clip_cov"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "updates"),
    covering(
        [(name, updates) for name in MOVES for updates in (1, 2)],
        [("grpo, k3 and entropy", 2), ("clip_cov", 2), ("dapo", 1)],
    ),
)
def test_a_step_moves_alike_for_any_split(name, updates):
    """A whole step: with two updates, or where samples are compared, proximal logprobs are noted
    before the first move.
    """
    algo, masters, metrics = (ROWS | WHOLE)[name], [], []
    for micro_tokens, share in ((1, False), (20, True)):
        t = trainer(
            model("llama"), algo, micro_tokens=micro_tokens, share_prompts=share, updates_per_step=updates, lr=1e-3
        )
        stats = step(t, batch(awkward_groups(), algo), algo)
        assert stats.stepped
        start = torch.cat([p.flatten() for p in model("llama").model.parameters()]).detach().double()
        masters.append(torch.cat([m.detach().flatten() for m in t.weights.masters]).double() - start)
        metrics.append(stats.metrics)
    for other, numbers in zip(masters[1:], metrics[1:]):
        # AdamW divides by the root of its second moment: tiny gradients magnify rounding
        assert apart(other, masters[0]) <= 2e-3
        for key in metrics[0].keys() & {
            "train/loss",
            "train/grad_norm",
            "train/entropy",
            "train/gap_mean",
            "train/clip_fraction",
            "train/kl_ref",
        }:
            assert numbers[key] == pytest.approx(metrics[0][key], rel=1e-4, abs=1e-6), key


def test_denominators_count_the_update_not_the_micro_batch():
    """Law 3 read backwards: without whole-batch denominators the split would show.
    Halving the batch must change the weights.
    """
    algo = ROWS["grpo"]
    b = batch(awkward_groups(), algo)
    t = trainer(model("llama"), algo)
    half = TrainBatch(b.samples[:5])
    assert apart(gradient(t, half, algo) * 5 / len(b.samples), gradient(t, half, algo)) > 0.1


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_answers_without_an_advantage_are_not_computed_and_count(name, monkeypatch):
    """Two of five groups earn the same for every answer, one of them because it has a single one: their tokens stay in the
    denominators, and no pass reads them.
    """
    algo, groups = ROWS[name], awkward_groups()
    for x in (x for group in groups[:2] for x in group.trajectories):
        x.score = Score(0.0 if name == "reinforce" else 0.1)
    t, b = trainer(algo=algo), batch(groups, algo)
    assert b.samples_to_compute(algo) == list(range(5, len(b.samples)))
    found, left = gradient(t, b, algo), TrainBatch(b.samples[5:])
    passes = sum(packed.token_count for packed in micro_batches(left, 10**6))
    monkeypatch.setattr(TrainBatch, "samples_to_compute", lambda b, row: list(range(len(b.samples))))
    assert apart(found, gradient(t, b, algo)) <= TOLERANCE
    assert name == "reinforce" or apart(found, gradient(t, left, algo)) > 1e-3  # they count in a mean
    monkeypatch.undo()
    metrics = step(t, b, algo).metrics
    assert metrics["train/packed_tokens"] == passes
    assert metrics["train/not_computed"] == pytest.approx(1 - left.total_tokens / b.total_tokens)


def test_of_a_step_without_any_advantage_one_group_is_measured_and_nothing_moves():
    algo, groups = ROWS["grpo"], awkward_groups()
    for x in (x for group in groups for x in group.trajectories):
        x.score = Score(1.0)
    t = trainer(algo=algo)
    before, stats = bits(t), step(t, batch(groups, algo), algo)
    assert bits(t) == before and stats.stepped and stats.metrics["train/grad_norm"] == 0
    assert stats.metrics["train/not_computed"] > 0.5 and stats.metrics["train/gap_max"] >= 0


def test_the_batch_falls_into_updates_of_whole_groups():
    b = batch(awkward_groups(), ROWS["grpo"])
    for n in range(1, 9):
        parts = b.split_updates(n)
        groups = [[s.group for s in part.samples] for part in parts]
        assert len(parts) == min(n, 5)
        assert sum(map(len, groups)) == len(b.samples)
        assert all(not set(a) & set(c) for i, a in enumerate(groups) for c in groups[:i])
        sizes = [len(set(g)) for g in groups]
        assert max(sizes) - min(sizes) <= 1


# -- the formulas alone: every row, in double precision --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("row", list(rows()))
def test_any_split_and_any_order_give_the_same_gradient(row, request):
    """All-masked samples, groups of 1, constant groups and no tokens at all are among the cases: finite, always."""
    rng = np.random.default_rng(list(request.node.callspec.id.encode()))  # each row has batches of its own
    for n in (int(rng.integers(1, 4)), int(rng.integers(4, 11))):
        batch = Ragged.make(rng.integers(0, 7, n).tolist(), int(rng.integers(100)))
        whole = batch.loss(row)[1]
        order, cuts = rng.permutation(n).tolist(), [at for at in range(1, n) if rng.random() < 0.4]
        split = batch.loss(row, order=order, cuts=cuts)[1]
        assert torch.isfinite(whole).all() and relative_difference(split, whole) <= 1e-12


def test_tokens_of_equal_covariance_are_chosen_in_any_order():
    """Two tokens always have the same: which of them is silenced must not hang on which came first."""
    row, batch = lively(table.TABLE["clip_cov"]), Ragged.make([0, 1, 1], 1)
    assert relative_difference(batch.loss(row, order=[2, 1, 0])[1], batch.loss(row)[1]) <= 1e-12


@pytest.mark.parametrize("row", [p for p in rows() if "proximal_logprobs" not in p.values[0].needs])
def test_decided_over_the_update_or_in_the_micro_batch_is_the_same_where_no_row_asks_for_it(row):
    batch = Ragged.make([3, 0, 5, 1, 4, 2], 5)
    assert (
        relative_difference(batch.loss(row, cuts=[2, 3], noted=True)[1], batch.loss(row, cuts=[2, 3], noted=False)[1])
        <= 1e-12
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "forking", "m2po", "opsa", "normalised"])
def test_a_choice_within_each_micro_batch_would_break_the_law(name):
    """The counter-example: what compares samples, decided locally, is another gradient."""
    row = (
        replace(table.GRPO, correction=correction.Importance(normalize="token"))
        if name == "normalised"
        else lively(table.TABLE[name])
    )
    worst = 0.0
    for seed in range(3):
        batch = Ragged.make([3, 6, 5, 2], seed)
        a_T = advantages_of(row, batch.scored())
        row = replace(row, aggregate=aggregate.FixedNorm(9))
        if isinstance(row.advantage, Constant):
            fixed, halves = row, [(row, [0, 1]), (row, [2, 3])]
        else:
            fixed = replace(row, advantage=Given(a_T))
            halves = [
                (replace(fixed, advantage=Given(a_T[:9])), [0, 1]),
                (replace(fixed, advantage=Given(a_T[9:])), [2, 3]),
            ]
        local = sum(batch.loss(half, order=part)[1] / 2 for half, part in halves)
        worst = max(worst, relative_difference(local, batch.loss(fixed)[1]))
    assert worst > 1e-3


@dataclass(frozen=True)
class Given(Component):
    """Advantages that are known, so that only the choice differs."""

    values_T: torch.Tensor
    per_token: ClassVar[bool] = True

    def __call__(self, scored):
        return self.values_T


@pytest.mark.parametrize("row", list(rows()))
def test_an_answer_without_an_advantage_has_no_gradient_where_the_row_says_so(row, monkeypatch):
    """And only there: what is not computed is nothing, and nothing is computed in vain."""
    batch = Ragged.make([3, 6, 5, 2], 3)
    silent_T = torch.arange(16) >= 9
    monkeypatch.setattr(algos, "advantages_of", lambda *of: advantages_of(*of).masked_fill(silent_T, 0.0))
    found = batch.loss(row)[1]
    assert bool((found[silent_T] == 0).all()) == row.scales_advantage


def test_a_surrogate_that_adds_to_another_one_is_computed_whole():
    """What Clip says of itself does not hold for what derives from it."""

    class Pulled(Clip):
        def __call__(self, tokens):
            own = super().__call__(tokens)
            return own._replace(loss_T=own.loss_T - 0.1 * tokens.logprobs)

    assert table.GRPO.scales_advantage and not replace(table.GRPO, surrogate=Pulled()).scales_advantage


def test_a_mean_over_each_micro_batch_would_break_the_law():
    """The counter-example: local denominators, averaged, are another gradient. So the test above can fail."""
    lengths_N, parts = torch.tensor([1, 9, 2]), [[0, 1], [2]]
    for how in AGGREGATES[:2]:
        local = torch.cat([how(lengths_N[part]) / len(parts) for part in parts])
        assert not torch.allclose(local, how(lengths_N))
