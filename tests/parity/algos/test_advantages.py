"""Rewards to advantages: closed forms, and the shaping before them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.algos import F64, near, scored, slope, tensor
from kits.train import trajectory
from rondel.algos import advantage, gae
from rondel.algos.reward_transforms import KimiLength, Overlong
from rondel.algos.table import resolve_algorithm
from rondel.core.types import Group, Task
from rondel.train.annotate import advantages_of
from rondel.train.pack import batch_of

# groups 9: 1 0 0 1, 4: 7 2, -2: 5 5
REWARDS, GROUPS = tensor(1, 7, 0, 0, 5, 1, 2, 5), torch.tensor([9, 4, 9, 9, -2, 9, 4, -2])
LENGTHS = torch.tensor([4, 1, 2, 0, 3, 2, 1, 5])
UP, DOWN = 0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)  # sqrt(1/3) is the unbiased std of 1 0 0 1
WIDE = 2.5 / (math.sqrt(12.5) + 1e-6)
CLOSED_FORMS = [
    (advantage.GroupNorm(), [UP, WIDE, DOWN, DOWN, 0, UP, -WIDE, 0]),
    (advantage.GroupCenter(), [0.5, 2.5, -0.5, -0.5, 0, 0.5, -2.5, 0]),
    (advantage.LeaveOneOut(), [1 - 1 / 3, 7 - 2, 0 - 2 / 3, 0 - 2 / 3, 0, 1 - 1 / 3, 2 - 7, 0]),
    (advantage.Raw(), [1, 7, 0, 0, 5, 1, 2, 5]),
    (advantage.Constant(1.0), [1] * 8),
    (advantage.LengthBaseline(), [1 - 6 / 8, 2.5, -6 / 8, -6 / 8, 0, 1 - 6 / 8, -2.5, 0]),
    (advantage.PassAtK(), [0, 5, 0, 0, 0, 0, 0, 0]),  # two share the first place in 9 and in -2
    (advantage.PassAtK(divide=True), [0, 5 / (math.sqrt(12.5) + 1e-6), 0, 0, 0, 0, 0, 0]),
    (
        advantage.MeanNorm(),
        [
            d / (m + 1e-6)
            for d, m in ((0.5, 0.5), (2.5, 4.5), (-0.5, 0.5), (-0.5, 0.5), (0, 5), (0.5, 0.5), (-2.5, 4.5), (0, 5))
        ],
    ),
    # the two of group -2 agree
    (advantage.SignalCenter(), [8 / 6 * d for d in (0.5, 2.5, -0.5, -0.5, 0, 0.5, -2.5, 0)]),
    (advantage.Accept(above=1.0), [0, 1, 0, 0, 1, 0, 1, 1]),
]


@pytest.mark.parametrize("rule,wanted", CLOSED_FORMS, ids=[type(rule).__name__ for rule, _ in CLOSED_FORMS])
def test_advantages_are_their_closed_forms(rule, wanted):
    assert near(rule(scored(REWARDS, GROUPS, LENGTHS)), wanted, 1e-14)


def test_a_constant_group_is_exactly_zero_even_where_its_mean_rounds():
    """Seven float32 rewards of 0.1 do not average to 0.1; eps alone would turn the rounding into
    an advantage of 1 %.
    """
    rewards, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert (rewards - rewards.sum() / 7).abs().max() > 0
    assert advantage.GroupNorm()(scored(rewards, group)).tolist() == [0.0] * 7


def test_eps_matters_exactly_where_a_group_nearly_agrees():
    rewards, group = tensor(0.5, 0.5 + 2e-6), torch.tensor([0, 0])
    std = math.sqrt(2) * 1e-6
    for eps in (1e-9, 1e-6, 1e-4):  # the spread of the peers' defaults
        assert near(advantage.GroupNorm(eps)(scored(rewards, group)), [-1e-6 / (std + eps), 1e-6 / (std + eps)], 1e-9)


@pytest.mark.parametrize("length,penalty", [(80, 0.0), (90, 0.5), (100, 1.0), (10, 0.0), (140, 1.0)])
def test_overlong_is_piecewise_linear(length, penalty):
    found = Overlong(max_tokens=100, buffer=20, factor=1.0)(scored(tensor(0.25), lengths=torch.tensor([length])))
    assert near(found, [0.25 - penalty])


def test_overlong_compares_the_limit_of_a_reply_with_the_longest_turn_of_an_episode():
    """dapo, max_tokens = 8: of two turns of 4 tokens none is long, and none of 3; of turns of 2, 8 and 1 one is."""
    rng = np.random.default_rng(0)
    turns = [[4, 4], [3], [2, 8, 1]]
    spans = [[span for n in lengths for span in ((n, 1), (2, 0))][:-1] for lengths in turns]
    group = Group(0, Task("t", "f", {}), [trajectory(s, rng, prompt=[5], reward=1.0) for s in spans], 0)
    row = resolve_algorithm({"kind": "dapo"}).bounded(8)
    assert row.shaping(batch_of([group]).scored_samples).tolist() == [1.0, 1.0, 0.0]


def test_overlong_takes_the_papers_share_as_its_buffer():
    lengths = torch.tensor([16384, 18432, 20480])
    assert near(Overlong(max_tokens=20480)(scored(torch.zeros(3, dtype=F64), lengths=lengths)), [0, -0.5, -1])


def test_whitening_is_over_all_tokens_so_a_long_sample_counts_more():
    rewards, group, lengths = tensor(1, 0), torch.tensor([0, 1]), torch.tensor([3, 1])
    flat = tensor(1, 1, 1, 0)
    wanted = (flat - 0.75) / math.sqrt(0.25 + 1e-8)
    assert near(gae.Returns()(scored(rewards, group, lengths)), wanted)
    wanted = (tensor(0.25, 0.5, 1, 0) - 0.4375) / (tensor(0.25, 0.5, 1, 0).var() + 1e-8).sqrt()
    assert near(gae.Returns(gamma=0.5)(scored(rewards, group, lengths)), wanted)
    assert advantage.WhitenedCenter()(scored(rewards, group, lengths)).tolist() == [0.0] * 4  # two groups of 1
    centred = tensor(0.5, 0.5, 0.5, -0.5)
    wanted = (centred - centred.mean()) / (centred.var() + 1e-8).sqrt()
    assert near(advantage.WhitenedCenter()(scored(rewards, torch.tensor([0, 0]), lengths)), wanted)


def test_each_part_of_a_reward_has_its_own_scale():
    """GDPO. Summed first, (1, 0) and (0, 1) would be one and the same reward; and a part a
    hundred times larger would be all that is seen.
    """
    right, form = tensor(1, 0, 1, 0), tensor(0, 100, 100, 0)
    found = advantage.PartsNorm()(scored(tensor(1, 100, 101, 0), right=right, form=form))
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-6), 50 / (100 * math.sqrt(1 / 3) + 1e-6)
    total = tensor(unit[0] - unit[1], unit[1] - unit[0], sum(unit), -sum(unit))
    assert near(found, (total - total.mean()) / (total.var() + 1e-8).sqrt())
    only = advantage.PartsNorm(weights={"form": 0.0})(scored(tensor(1, 100, 101, 0), right=right, form=form))
    assert near(only, (right - 0.5) / 0.5 * only[0]) and only[0] > 0
    with pytest.raises(advantage.ConfigError, match="which are: right, form; weights also names fluency"):
        advantage.PartsNorm(weights={"fluency": 1.0})(scored(tensor(1), right=tensor(1), form=tensor(1)))
    with pytest.raises(advantage.ConfigError, match=r"which are: none\. Let the reward return"):
        advantage.PartsNorm()(scored(tensor(1)))


def test_a_part_that_a_sample_lacks_adds_nothing_and_stands_in_no_mean():
    """One task's reward names both parts, another's only the first; TRL's nanmean, nanstd and nansum do the same."""
    nan, group = math.nan, torch.tensor([0, 0, 0, 1, 1, 1])
    right, form = tensor(1, 0, 1, 0, 1, 1), tensor(0, 1, 1, nan, 0, 3)
    found = advantage.PartsNorm()(scored(tensor(1, 1, 2, 0, 1, 4), group, right=right, form=form))
    s = math.sqrt(1 / 3) + 1e-6
    first = tensor(1 / 3, -2 / 3, 1 / 3, -2 / 3, 1 / 3, 1 / 3) / s
    total = first + tensor(
        *(x / s for x in (-2 / 3, 1 / 3, 1 / 3)), 0, *(x / (math.sqrt(4.5) + 1e-6) for x in (-1.5, 1.5))
    )
    assert near(found, (total - total.mean()) / (total.var() + 1e-8).sqrt(), 1e-8)
    with pytest.raises(advantage.ConfigError, match="1 of 2 samples were scored with a number alone"):
        advantage.PartsNorm()(scored(tensor(1, 2), right=tensor(1, nan)))


def test_the_length_baseline_has_the_least_variance_where_squared_gradients_grow_with_length():
    """OPO on a toy: gradient norms² = length, so the baseline that minimises sum of
    length·(r - b)² is the weighted mean.
    """
    rewards, lengths = tensor(1, 0, 0, 1, 1), torch.tensor([1, 9, 4, 2, 3])
    baseline = (rewards - advantage.LengthBaseline()(scored(rewards, lengths=lengths)))[0]
    variance = {
        b: float((lengths * (rewards - b).square()).sum())
        for b in (float(baseline), float(rewards.mean()), float(baseline) + 0.01)
    }
    assert min(variance, key=variance.__getitem__) == float(baseline)


def test_maxrl_follows_the_log_of_the_pass_rate():
    """Exact over every outcome of n Bernoulli draws: the mean slope in p is (1 -
    (1-p)^(n-1)) / p, that of log p = -sum (1-p)^k / k cut after n - 1 terms. The
    baseline costs one term of the paper's n.
    """
    p, n = 0.3, 6
    total = 0.0
    for successes in range(n + 1):
        chance = math.comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        rewards = torch.tensor([1.0] * successes + [0.0] * (n - successes), dtype=F64)
        slope = torch.where(rewards > 0, tensor(1 / p), tensor(-1 / (1 - p)))  # of logp with respect to p
        total += chance * float((advantage.MeanNorm(eps=1e-12)(scored(rewards)) * slope).mean())
    assert total == pytest.approx((1 - (1 - p) ** (n - 1)) / p, rel=1e-9)


@pytest.mark.parametrize(
    "reward,length,point",
    [
        (1.0, 10, 0.5),
        (1.0, 30, -0.5),
        (0.0, 10, 0.0),
        (0.0, 30, -0.5),
        (1.0, 20, 0.0),
        (0.0, 15, 0.0),
        (0.0, 25, -0.25),
    ],
)
def test_the_corners_of_the_kimi_length_reward(reward, length, point):
    """A9: right and short +0.5, right and long -0.5, wrong and short 0, wrong and long -0.5."""
    found = KimiLength()(scored(tensor(reward, 1, 1), lengths=torch.tensor([length, 10, 30])))
    assert near(found[:1], [reward + point])
    assert near(
        KimiLength(factor=0.1)(scored(tensor(reward, 1, 1), lengths=torch.tensor([length, 10, 30])))[:1],
        [reward + point / 10],
    )
    assert KimiLength()(scored(tensor(1, 0), lengths=torch.tensor([7, 7]))).tolist() == [1, 0]


def test_a_preference_has_the_gradient_of_dpo():
    """-log sigmoid of the margin, its mean over pairs, by autograd; ties share a pair, a
    constant group and unwritten samples are in none.
    """
    lengths, group = torch.tensor([3, 2, 1, 4, 0, 2, 2]), torch.tensor([1, 1, 1, 5, 5, 5, 8])
    rewards, make = tensor(1, 0, 1, 0.5, 9, 0.2, 1), torch.Generator().manual_seed(3)
    logp = torch.randn(14, generator=make, dtype=F64).requires_grad_()
    ref = torch.randn(14, generator=make, dtype=F64)
    given = scored(rewards, group, lengths)
    sums = given.sum_by_sample(logp - ref)
    pairs = [[(0, 1), (2, 1)], [(3, 5)]]
    loss = sum(-torch.sigmoid(0.3 * (sums[w] - sums[b])).log() / len(some) for some in pairs for w, b in some) / len(
        pairs
    )
    row = resolve_algorithm({"kind": "online_dpo", "advantage": {"beta": 0.3}})
    advantages_T = advantages_of(row, replace(given, proximal_T=logp.detach(), ref_T=ref))
    ours = (given.spread_to_tokens(row.aggregate(lengths)) * -advantages_T * logp).sum()
    assert near(slope(ours, logp), slope(loss, logp), 1e-12)
