"""Weights of tokens, advantages and losses: sums, zeros, whitening, masked answers; finite for every batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.algos import AGGREGATES, F64, Ragged, relative_difference, rows, scored
from kits.train import awkward_groups, model, step, trainer
from kits.train import row as row_of
from rondel.algos import advantage, aggregate, correction, gae, table
from rondel.core.errors import ConfigError
from rondel.train.pack import TrainBatch, batch_of
from rondel.train.step_metrics import StepMetricSums

COMPARING = [
    *(
        advantage.GroupNorm(),
        advantage.GroupCenter(),
        advantage.LeaveOneOut(),
        advantage.LengthBaseline(),
        advantage.PassAtK(divide=True),
    ),
    *(advantage.MeanNorm(), advantage.SignalCenter()),
]
ADVANTAGES = [*COMPARING, advantage.Accept(), advantage.Raw(), advantage.Constant()]


named = pytest.mark.parametrize("rule", ADVANTAGES, ids=lambda rule: type(rule).__name__)
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=10)
quick = settings(max_examples=15, deadline=None)


# -- the weights themselves
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@quick
@given(lengths)
def test_the_weights_add_up_to_what_the_mode_says(lengths):
    lengths_N, some = torch.tensor(lengths), any(lengths)
    counted = sum(n > 0 for n in lengths)
    total = {type(how).__name__: float((how(lengths_N) * lengths_N).sum()) for how in AGGREGATES}
    mean = sum(lengths) / counted if some else 0.0
    wanted = {
        "TokenMean": float(some),
        "SeqMeanTokenMean": float(some),
        "PromptMean": float(some),
        "SeqMeanTokenSum": mean,
        "FixedNorm": mean / 9,
    }
    assert total == pytest.approx(wanted)


@pytest.mark.slow
@quick
@given(lengths, st.integers(0, 5))
def test_samples_without_trainable_tokens_change_nothing(lengths, extra):
    for how in AGGREGATES:
        padded = how(torch.tensor(lengths + [0] * extra))
        assert torch.equal(padded[: len(lengths)], how(torch.tensor(lengths))) and not padded[len(lengths) :].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_weights_of_nothing_are_zeros(lengths):
    for how in AGGREGATES:
        assert how(torch.tensor(lengths, dtype=torch.int64)).tolist() == [0.0] * len(lengths)


def test_an_unset_length_is_said_aloud():
    with pytest.raises(ConfigError, match=r"algo.aggregate.length is not set"):
        aggregate.FixedNorm()(torch.tensor([1]))
    assert aggregate.FixedNorm().bounded(4)(torch.tensor([1, 3])).tolist() == [0.125, 0.125]
    assert aggregate.FixedNorm(7).bounded(4).length == 7


# -- advantages
# ---------------------------------------------------------------------------------------------------------

groups = st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(-2, 3)), max_size=12)


@pytest.mark.slow
@named
@quick
@given(samples=groups, data=st.data())
def test_advantages_move_with_their_samples(rule, samples, data):
    rewards_N, group_N = (
        torch.tensor([r for r, _ in samples], dtype=F64),
        torch.tensor([g for _, g in samples], dtype=torch.int64),
    )
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))), dtype=torch.int64)
    renamed = group_N * 1_000_003 + 17  # ids are names, not indices
    assert torch.allclose(
        rule(scored(rewards_N[order], renamed[order])), rule(scored(rewards_N, group_N))[order], rtol=1e-9, atol=1e-9
    )


@named
@quick
@given(samples=groups, dtype=st.sampled_from([torch.float32, F64]))
def test_advantages_are_total(rule, samples, dtype):
    rewards_N, group_N = (
        torch.tensor([r for r, _ in samples], dtype=dtype),
        torch.tensor([g for _, g in samples], dtype=torch.int64),
    )
    found = rule(scored(rewards_N, group_N))
    assert found.shape == rewards_N.shape and found.dtype == dtype and torch.isfinite(found).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule", COMPARING, ids=lambda rule: type(rule).__name__)
@quick
@given(reward=st.floats(-1e3, 1e3, width=32), size=st.integers(1, 9), dtype=st.sampled_from([torch.float32, F64]))
def test_a_constant_group_is_exactly_zero(rule, reward, size, dtype):
    assert not rule(scored(torch.full((size,), reward, dtype=dtype), torch.full((size,), 5))).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [rule for rule in COMPARING if not isinstance(rule, advantage.PassAtK | advantage.MeanNorm)],
    ids=lambda r: type(r).__name__,
)
@quick
@given(samples=groups)
def test_a_baseline_leaves_nothing_over_in_its_group(rule, samples):
    rewards_N, group_N = (
        torch.tensor([r for r, _ in samples], dtype=F64),
        torch.tensor([g for _, g in samples], dtype=torch.int64),
    )
    found = rule(scored(rewards_N, group_N))
    assert all(abs(float(found[group_N == g].sum())) < 1e-8 for g in group_N.unique())


@pytest.mark.slow
def test_an_empty_micro_batch_is_a_loss_of_zero():
    for p in rows():
        loss, gradient, (terms,) = Ragged.make([], 0).loss(p.values[0])
        assert float(loss) == 0 and gradient.numel() == 0 and all(term.shape == (0,) for term in terms.values())


@pytest.mark.parametrize(
    "rule", [gae.Returns(0.9), advantage.WhitenedCenter(), advantage.PartsNorm()], ids=lambda r: type(r).__name__
)
@quick
@given(lengths=st.lists(st.integers(0, 6), max_size=9), seed=st.integers(0, 99))
def test_what_is_whitened_has_mean_0_and_a_variance_of_1_at_most(rule, lengths, seed):
    found = rule(Ragged.make(lengths, seed).scored())
    assert torch.isfinite(found).all()
    assert len(found) < 2 or (abs(float(found.mean())) < 1e-9 and float(found.var()) < 1 + 1e-9)


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("normalize", ["none", "token", "sequence"])
def test_an_update_whose_every_token_is_rejected_is_a_loss_of_zero(denominator, normalize):
    rule = correction.Importance(
        veto=0.9, reject="token", reject_low=1.0, reject_high=1.0, normalize=normalize, denominator=denominator
    )
    for row in (table.GRPO, table.DAPO.bounded(9), table.RLOO):
        batch = Ragged.make([3, 1, 4], 2)
        batch.guided_N[:] = False  # a demonstration has no behavior to be far from
        loss, gradient, (terms,) = batch.loss(replace(row, correction=rule))
        assert float(loss) == 0 and not gradient.any() and not terms["correction"].any()


def test_rejected_tokens_leave_the_denominator_only_if_told_to():
    """One sample of two is rejected whole: the mean over samples halves the other
    one, unless only the kept are counted.
    """
    batch = Ragged.make([2, 3], 0)
    # the second sample's weight is e³
    batch.others_3T[1] = batch.others_3T[0] - torch.tensor([0, 0, 3, 3, 3], dtype=F64)
    stay = replace(table.REINFORCE, correction=correction.Importance(action="mask"))
    leave = replace(stay, correction=correction.Importance(action="mask", denominator="kept"))
    assert (
        relative_difference(batch.loss(leave)[1], 2 * batch.loss(stay)[1]) <= 1e-12 and batch.loss(stay)[1].norm() > 0.1
    )


# -- answers that the token limit cut off
# -------------------------------------------------------------------------------


def step_gradient(kind, cut, **knobs):
    """Of one step on the awkward groups, of which the samples with these places were cut off."""
    algo, b = row_of(kind, **knobs), batch_of(awkward_groups())
    for i in cut:
        b.samples[i].truncated = True
    t = trainer(model(), algo, lr=0.0, clip=1e9)
    t._precompute_update(b, algo, [b], set())
    t._optimizer_step(b, algo, StepMetricSums(), defaultdict(float), more=set(), critic=None, frozen=False)
    return torch.cat([p.grad.flatten() for p in t.loaded.model.parameters()]), b


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_norm"])
def test_a_masked_answer_gives_no_gradient_and_keeps_its_place_in_the_baseline(kind):
    """Without KL it is as if its advantage were 0; only the tokens leave the denominator that counts tokens."""
    cut, how = [1, 7, 11], {"aggregate": {"kind": kind}}
    masked, b = step_gradient("dr_grpo", cut, mask_truncated=True, **how)
    whole, _ = step_gradient("dr_grpo", cut, **how)
    algo = row_of("dr_grpo", **how)
    t = trainer(model(), algo)
    for i in cut:
        b.samples[i].known.advantages.numpy()[:] = 0
    t.weights.zero_grad()
    t._accumulate_gradients(b, algo, StepMetricSums(), proximal_noted=False)
    zeroed = torch.cat([p.grad.flatten() for p in t.loaded.model.parameters()])
    lengths = [len(s.trainable) for s in b.samples]
    scale = sum(lengths) / (sum(lengths) - sum(lengths[i] for i in cut)) if kind == "token_mean" else 1.0
    assert float((masked - scale * zeroed).norm()) <= 1e-5 * float(masked.norm())
    assert float((masked - whole).norm()) > 1e-2 * float(whole.norm())


@pytest.mark.slow
def test_a_masked_answer_pays_no_kl_and_no_entropy_either_and_a_step_of_masked_answers_moves_nothing():
    knobs = {"kl": {"coef": 0.1}, "entropy": {"coef": 0.05, "top": 0.5}, "aggregate": {"kind": "token_mean"}}
    cut = [i for i in range(14) if i not in (4, 5)]
    masked, b = step_gradient("grpo", cut, mask_truncated=True, **knobs)
    algo, own = row_of("grpo", **knobs), TrainBatch([b.samples[i] for i in (4, 5)])
    t = trainer(model(), algo)
    t.weights.zero_grad()
    t._accumulate_gradients(own, algo, StepMetricSums(), proximal_noted=True)
    alone = torch.cat([p.grad.flatten() for p in t.loaded.model.parameters()])
    assert float((masked - alone).norm()) <= 1e-5 * float(alone.norm()) and float(alone.norm()) > 0
    algo, b = row_of("ppo", mask_truncated=True), batch_of(awkward_groups())
    for s in b.samples:
        s.truncated = True
    t = trainer(model(), algo, start_probe=4)
    before = [p.clone() for p in t.loaded.model.parameters()]
    stats = step(t, b, algo)
    assert (
        stats.stepped
        and stats.metrics["train/truncated_masked"] == len(b.samples)
        and "train/kl_to_start" not in stats.metrics
    )
    assert all(torch.equal(p, was) for p, was in zip(t.loaded.model.parameters(), before, strict=True))
