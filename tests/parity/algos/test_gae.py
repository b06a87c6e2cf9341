"""Advantages along time against a loop over tokens in float64 that knows the mask, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondel.algos.advantage import whiten_values
from rondel.algos.discount import discounted_returns, gae, next_values, sample_lengths


def naive(rewards, values, mask, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """One sample, all its tokens: what the policy did not write is carried over unchanged."""
    value = advantage = 0.0
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            advantage = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
            value = values[t]
            advantages[t], returns[t] = advantage, advantage + value
    return advantages, returns


def ragged(lengths: list[int], seed: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    draw = [torch.randn(total, generator=rng, dtype=torch.float64).to(dtype) for _ in range(2)]
    return *draw, (7 + 3 * torch.arange(len(lengths))).repeat_interleave(torch.tensor(lengths))


KNOBS = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 0.5)]
LENGTHS = [[1], [5], [1, 1, 1], [3, 1, 700, 2], [129, 128, 127, 1, 256, 257], [40000, 1], [1] * 300 + [1000]]


@pytest.mark.parametrize("gamma, lam", KNOBS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_the_loop_over_tokens(lengths, gamma, lam):
    rewards, values, sample = ragged(lengths, 0)
    advantages, targets = gae(rewards, values, sample, gamma=gamma, lam=lam)
    expected = [
        naive(r.tolist(), v.tolist(), [True] * len(r), gamma, lam)
        for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True)
    ]
    for got, which in ((advantages, 0), (targets, 1)):
        exact = np.concatenate([row[which] for row in expected])
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=6),
    st.sampled_from(KNOBS),
    st.integers(0, 99),
)
def test_what_the_policy_only_read_changes_nothing(masks, knobs, seed):
    """The masked loop over whole streams equals the scan over the written tokens alone, whatever stands in between."""
    rng = np.random.default_rng(seed)
    flat = np.concatenate([np.array(m) for m in masks])
    rewards, values = rng.normal(size=(2, len(flat)))
    at = np.split(np.arange(len(flat)), np.cumsum([len(m) for m in masks])[:-1])
    exact = np.concatenate([naive(rewards[i], values[i], flat[i], *knobs)[0] for i in at])
    sample = torch.from_numpy(np.repeat(np.arange(len(masks)), [len(m) for m in masks]))
    kept = torch.from_numpy(flat)
    got, _ = gae(
        torch.from_numpy(rewards)[kept], torch.from_numpy(values)[kept], sample[kept], gamma=knobs[0], lam=knobs[1]
    )
    np.testing.assert_allclose(got.numpy(), exact[flat], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.999, 0.99)])
def test_a_long_sample_in_float32(gamma, lam):
    """T = 65536: the scan in float32 is as near to the exact loop as 1e-4."""
    rewards, values, sample = ragged([65536, 65536], 1)
    exact = np.concatenate(
        [
            naive(r, v, [True] * 65536, gamma, lam)[0]
            for r, v in zip(rewards.view(2, -1).tolist(), values.view(2, -1).tolist())
        ]
    )
    got, _ = gae(rewards.float(), values.float(), sample, gamma=gamma, lam=lam)
    apart = np.abs(got.double().numpy() - exact)
    assert apart.max() <= 1e-4 * np.abs(exact).max() and np.linalg.norm(apart) <= 1e-4 * np.linalg.norm(exact)


def test_a_chain_of_two_states():
    """State 1 pays 1 and leads to 0, which pays nothing and leads to 1. With the true
    values nothing is an advantage; without any it is the discounted reward, a geometric series."""
    gamma, steps = 0.9, 200
    state = torch.arange(steps) % 2
    left = steps - torch.arange(steps)
    pays = (left + state) // 2  # how many rewards are still to come
    first = gamma ** (1.0 - state.double())  # the next one is due now or in a step
    value = first * (1 - gamma ** (2.0 * pays.double())) / (1 - gamma**2)
    sample = torch.zeros(steps, dtype=torch.int64)
    for lam in (0.0, 0.7, 1.0):
        advantages, targets = gae(state.double(), value, sample, gamma=gamma, lam=lam)
        assert advantages.abs().max() < 1e-12 and torch.allclose(targets, value)
    advantages, _ = gae(state.double(), torch.zeros_like(value), sample, gamma=gamma, lam=1.0)
    assert torch.allclose(advantages, value)


def test_one_reward_at_the_end_is_credited_to_every_token():
    rewards = torch.tensor([0.0, 0.0, 2.0, 0.0, -1.0])
    sample = torch.tensor([4, 4, 4, 9, 9])
    advantages, targets = gae(rewards, torch.zeros(5), sample, gamma=1.0, lam=1.0)
    assert advantages.tolist() == targets.tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]
    assert discounted_returns(rewards, sample, gamma=0.5).tolist() == [0.5, 1.0, 2.0, -0.5, -1.0]
    assert next_values(rewards, sample_lengths(sample)).tolist() == [0.0, 2.0, 0.0, -1.0, 0.0]


def test_nothing_gives_nothing():
    none = torch.zeros(0)
    assert [len(x) for x in gae(none, none, none.long(), gamma=1.0, lam=1.0)] == [0, 0] and len(
        discounted_returns(none, none.long(), gamma=1.0)
    ) == 0


def test_the_order_of_samples_is_only_an_order():
    rewards, values, sample = ragged([3, 400, 1, 90], 2)
    pieces = list(range(4))[::-1]
    back = torch.cat([torch.arange(len(sample))[sample == 7 + 3 * n] for n in pieces])
    a, _ = gae(rewards, values, sample, gamma=1.0, lam=0.95)
    b, _ = gae(rewards[back], values[back], sample[back], gamma=1.0, lam=0.95)
    assert torch.allclose(a[back], b)


def test_whitened():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    y = whiten_values(x)
    exact = (x.numpy() - x.numpy().mean()) / np.sqrt(x.numpy().var(ddof=1) + 1e-8)
    np.testing.assert_allclose(y.numpy(), exact, rtol=1e-10, atol=1e-10)
    assert whiten_values(torch.full((7,), 0.1)).tolist() == [0.0] * 7 and whiten_values(
        torch.tensor([3.0])
    ).tolist() == [0.0]
    assert len(whiten_values(torch.zeros(0))) == 0
