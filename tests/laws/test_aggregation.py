"""Law 3: the gradient is the same for any split of the samples into micro-batches, any order and any permutation of the groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from algos_kit import F64, scored
from hypothesis import given, settings
from hypothesis import strategies as st

from rondel.algos import advantage, aggregate, correction, kl, table
from rondel.algos.entropy import EntropyBonus
from rondel.algos.objective import objective
from rondel.algos.scored import Scored
from rondel.algos.shaping import Overlong
from rondel.words.errors import ConfigError

AGGREGATES = [aggregate.TokenMean(), aggregate.SeqMeanTokenMean(), aggregate.SeqMeanTokenSum(), aggregate.FixedNorm(9)]
ADVANTAGES = [advantage.GroupNorm(), advantage.GroupCenter(), advantage.LeaveOneOut(), advantage.Raw(), advantage.Constant()]
ROWS = [
    replace(row.bounded(6), aggregate=how, correction=correction.TokenTIS(), kl=kl.Kl("k3", 0.1), entropy=EntropyBonus(0.01))
    for row in (table.DAPO, table.RLOO, table.SFT)
    for how in AGGREGATES
]
named = pytest.mark.parametrize("rule", ADVANTAGES, ids=lambda rule: type(rule).__name__)
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=10)
quick = settings(max_examples=40, deadline=None)


class Batch:
    """Ragged samples of random tokens, and the gradient of a row's loss with respect to their logits."""

    def __init__(self, lengths: list[int], seed: int, row: table.Algorithm) -> None:
        make = torch.Generator().manual_seed(seed)
        t, n = sum(lengths), len(lengths)
        self.row, self.lengths_N = row, torch.tensor(lengths)
        self.sample_T = torch.arange(n).repeat_interleave(self.lengths_N)
        self.logits_TV, self.noise_3T = torch.randn(t, 5, generator=make, dtype=F64), 0.3 * torch.randn(3, t, generator=make, dtype=F64)
        self.rewards_N = torch.randint(0, 4, (n,), generator=make).to(F64)
        self.group_N = torch.randint(0, 3, (n,), generator=make)

    def gradient(self, parts: list[list[int]], order: torch.Tensor | None = None) -> torch.Tensor:
        """Accumulated over micro-batches of whole samples; `order` permutes the samples before the advantages are computed."""
        order = torch.arange(len(self.lengths_N)) if order is None else order
        step = Scored(self.rewards_N[order], self.group_N[order], self.lengths_N[order])
        advantages_T, weight_N = torch.zeros(len(self.sample_T), dtype=F64), torch.zeros_like(self.rewards_N)
        advantages_T[torch.cat([(self.sample_T == i).nonzero()[:, 0] for i in order])] = self.row.advantages_T(step)
        weight_N[order] = self.row.aggregate(self.lengths_N[order])
        logits_TV = self.logits_TV.clone().requires_grad_()
        for part in parts:
            at = torch.cat([(self.sample_T == i).nonzero()[:, 0] for i in part])
            logps = logits_TV[at].log_softmax(-1)
            logp_T = logps[:, 0]
            old, mu, ref = (logp_T.detach() + noise for noise in self.noise_3T[:, at])
            _, sample_T = torch.unique(self.sample_T[at], return_inverse=True)
            loss, _ = objective(
                self.row, logprobs_T=logp_T, entropy_T=-(logps.exp() * logps).sum(-1), proximal_T=old, behavior_T=mu, ref_T=ref,
                advantages_T=advantages_T[at], weight_T=weight_N[self.sample_T[at]], sample_T=sample_T,
            )  # fmt: skip
            loss.backward()
        return logits_TV.grad


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{type(row.aggregate).__name__}")
@settings(max_examples=12, deadline=None)
@given(lengths=lengths, seed=st.integers(0, 99), data=st.data())
def test_any_split_and_any_order_give_the_same_gradient(row, lengths, seed, data):
    batch, n = Batch(lengths, seed, row), len(lengths)
    whole = batch.gradient([list(range(n))])
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n))) | {0, n})
    parts = [order[a:b] for a, b in pairwise(cuts)]
    split = batch.gradient(parts, torch.tensor(order))
    assert torch.isfinite(whole).all() and (split - whole).norm() <= 1e-12 * max(1.0, float(whole.norm()))


def test_a_mean_over_each_micro_batch_would_break_the_law():
    """The counter-example: local denominators, averaged, are another gradient. So the test above can fail."""
    lengths_N, parts = torch.tensor([1, 9, 2]), [[0, 1], [2]]
    for how in AGGREGATES[:2]:
        local = torch.cat([how(lengths_N[part]) / len(parts) for part in parts])
        assert not torch.allclose(local, how(lengths_N))


# -- the weights themselves ---------------------------------------------------------------------------------------------


@quick
@given(lengths)
def test_the_weights_add_up_to_what_the_mode_says(lengths):
    lengths_N, some = torch.tensor(lengths), any(lengths)
    counted = sum(n > 0 for n in lengths)
    total = {type(how).__name__: float((how(lengths_N) * lengths_N).sum()) for how in AGGREGATES}
    mean = sum(lengths) / counted if some else 0.0
    wanted = {"TokenMean": float(some), "SeqMeanTokenMean": float(some), "SeqMeanTokenSum": mean, "FixedNorm": mean / 9}
    assert total == pytest.approx(wanted)


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


# -- advantages ---------------------------------------------------------------------------------------------------------

groups = st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(-2, 3)), max_size=12)


@named
@quick
@given(samples=groups, data=st.data())
def test_advantages_move_with_their_samples(rule, samples, data):
    rewards_N, group_N = torch.tensor([r for r, _ in samples], dtype=F64), torch.tensor([g for _, g in samples], dtype=torch.int64)
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))), dtype=torch.int64)
    renamed = group_N * 1_000_003 + 17  # ids are names, not indices
    assert torch.allclose(rule(scored(rewards_N[order], renamed[order])), rule(scored(rewards_N, group_N))[order], rtol=1e-9, atol=1e-9)


@named
@quick
@given(samples=groups, dtype=st.sampled_from([torch.float32, F64]))
def test_advantages_are_total(rule, samples, dtype):
    rewards_N, group_N = torch.tensor([r for r, _ in samples], dtype=dtype), torch.tensor([g for _, g in samples], dtype=torch.int64)
    found = rule(scored(rewards_N, group_N))
    assert found.shape == rewards_N.shape and found.dtype == dtype and torch.isfinite(found).all()


@pytest.mark.parametrize("rule", ADVANTAGES[:3], ids=lambda rule: type(rule).__name__)
@quick
@given(reward=st.floats(-1e3, 1e3, width=32), size=st.integers(1, 9), dtype=st.sampled_from([torch.float32, F64]))
def test_a_constant_group_is_exactly_zero(rule, reward, size, dtype):
    assert not rule(scored(torch.full((size,), reward, dtype=dtype), torch.full((size,), 5))).any()


@pytest.mark.parametrize("rule", ADVANTAGES[:3], ids=lambda rule: type(rule).__name__)
@quick
@given(samples=groups)
def test_a_baseline_leaves_nothing_over_in_its_group(rule, samples):
    rewards_N, group_N = torch.tensor([r for r, _ in samples], dtype=F64), torch.tensor([g for _, g in samples], dtype=torch.int64)
    found = rule(scored(rewards_N, group_N))
    assert all(abs(float(found[group_N == g].sum())) < 1e-8 for g in group_N.unique())


def test_an_empty_micro_batch_is_a_loss_of_zero():
    nothing = torch.zeros(0, dtype=F64, requires_grad=True)
    rest = dict.fromkeys(("entropy_T", "proximal_T", "behavior_T", "ref_T", "advantages_T", "weight_T"), nothing.detach())
    for row in ROWS:
        loss, terms = objective(row, logprobs_T=nothing, sample_T=torch.zeros(0, dtype=torch.int64), **rest)
        loss.backward()
        assert float(loss.detach()) == 0 and all(term.shape == (0,) for term in terms.values())
    assert Overlong(5)(scored(nothing.detach())).shape == (0,)
