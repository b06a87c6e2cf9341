"""The rows that look along time, one token at a time in float64; the critic's loss, the steered KL, closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kits.algos import F64, near, slope, tensor
from rondel.algos import kl, table
from rondel.algos.explanation import explain_objective
from rondel.algos.gae import Gae, Returns
from rondel.algos.objective import objective
from rondel.algos.reward_transforms import ClipReward
from rondel.algos.scored_samples import ScoredSamples
from rondel.algos.tokens import TokenBatch
from rondel.algos.value import ClippedValue, explained_variance
from rondel.core.errors import ConfigError
from rondel.train.annotate import advantages_of
from rondel.train.shaped_rewards import returns_of, with_shaped_rewards

LENGTHS = [3, 0, 7, 1, 10, 5, 2, 300]
REWARDS = [1.0, 0.5, -8.0, 1.0, 6.0, 2.0, 0.7, 0.0]


def a_step(seed: int = 0) -> ScoredSamples:
    draw, total = torch.Generator().manual_seed(seed), sum(LENGTHS)
    values, behavior, ref, extra = (torch.randn(total, generator=draw, dtype=F64) for _ in range(4))
    scored = ScoredSamples(
        tensor(*REWARDS),
        torch.arange(len(LENGTHS)) // 2,
        torch.tensor(LENGTHS),
        values_T=values,
        behavior_T=behavior,
        ref_T=ref,
    )
    extra = extra * (torch.rand(total, generator=draw) < 0.1)  # earned on the way; the rest at the end
    return replace(scored, earned_T=extra + scored.at_end(scored.rewards_N - scored.sum_by_sample(extra)))


def estimate(kind: str, x: float) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kind]


def naive(row, scored: ScoredSamples) -> tuple[list[float], list[float]]:
    """(advantages, returns) before whitening."""
    advantages, returns, first = [], [], 0
    for n, length in enumerate(LENGTHS):
        own = range(first, first + length)
        earned = [float(scored.earned_T[t]) for t in own]
        if length:
            limit = row.shaping.limit if isinstance(row.shaping, ClipReward) else math.inf
            earned[-1] += min(max(REWARDS[n], -limit), limit) - REWARDS[n]
        if row.kl.where == "reward":
            earned = [
                r - row.kl.coef * estimate(row.kl.kind, float(scored.behavior_T[t] - scored.ref_T[t]))
                for r, t in zip(earned, own)
            ]
        values = [float(scored.values_T[t]) if isinstance(row.advantage, Gae) else 0.0 for t in own] + [0.0]
        for t in range(length):  # the sum written out, not the recursion
            gamma, lam = row.advantage.gamma, getattr(row.advantage, "lam", 1.0)
            deltas = [earned[k] + gamma * values[k + 1] - values[k] for k in range(t, length)]
            advantages.append(sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas)))
            returns.append(advantages[-1] + values[t])
        first += length
    return advantages, returns


def rows():
    for kind in kl.ESTIMATORS:
        yield replace(table.PPO, kl=kl.Kl(kind, 0.1, "reward"))
        yield replace(table.REINFORCE_PP, kl=kl.Kl(kind, 0.1, "reward"), advantage=Returns(0.97))
    yield table.PPO
    yield replace(table.PPO, advantage=Gae(0.99, 0.0), shaping=ClipReward(0.6))
    yield replace(table.PPO, advantage=Gae(1.0, 1.0, whiten=False))
    yield table.REINFORCE_PP


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.name} {row.advantage} {row.kl.kind}"[:60])
def test_advantages_and_returns_one_token_at_a_time(row):
    scored = a_step()
    advantages, returns = naive(row, scored)
    exact = torch.tensor(advantages, dtype=F64)
    if row.advantage.whiten:
        exact = (exact - exact.mean()) / (exact.var() + 1e-8).sqrt()
    assert near(advantages_of(row, scored), exact)
    if "values" in row.needs:
        assert near(returns_of(row, scored), returns)


@pytest.mark.parametrize("row", [table.PPO, table.REINFORCE_PP], ids=lambda row: row.name)
def test_the_loss_of_the_row(row):
    """Mean over all tokens of the clipped surrogate; a KL that is charged to the reward is not in it."""
    scored = replace(a_step(), ref_T=a_step(3).ref_T)
    draw = torch.Generator().manual_seed(1)
    logp = torch.randn(sum(LENGTHS), generator=draw, dtype=F64).requires_grad_()
    old = logp.detach() + 0.3 * torch.randn(len(logp), generator=draw, dtype=F64)
    advantages = advantages_of(row, scored)
    loss, _ = objective(
        row,
        TokenBatch(
            scored.sample_T,
            logprobs=logp,
            proximal=old,
            behavior=scored.behavior_T,
            reference=scored.ref_T,
            advantages=advantages,
        ),
        scored.spread_to_tokens(row.aggregate(scored.lengths_N)),
    )
    wanted = 0.0
    for t, a in enumerate(advantages.tolist()):
        ratio = (logp[t] - old[t]).exp()
        held = min(max(ratio.item(), 0.8), 1.2)
        wanted = wanted + (max(-ratio * a, torch.tensor(-held * a, dtype=F64), key=torch.Tensor.item)) / sum(LENGTHS)
    assert near(loss, wanted.detach()) and near(slope(loss, logp), slope(wanted, logp))


# (v, v_old, G) -> loss, its gradient, clipped; clip = 0.2
GOLDEN = [
    ((1.0, 1.0, 3.0), 2.0, -2.0, False),  # not moved yet: the squared error
    ((1.1, 1.0, 3.0), 1.805, -1.9, False),
    ((1.5, 1.0, 3.0), 1.62, 0.0, True),  # too far towards the return: held at 1.2
    ((3.5, 1.0, 3.0), 1.62, 0.0, True),  # far beyond it
    ((0.5, 1.0, 3.0), 3.125, -2.5, False),  # away from it: free to come back
    ((1.0, 1.0, -1.0), 2.0, 2.0, False),
    ((0.9, 1.0, -1.0), 1.805, 1.9, False),
    ((0.5, 1.0, -1.0), 1.62, 0.0, True),
    ((-3.0, 1.0, -1.0), 2.0, -2.0, False),  # worse on the other side than the bound would be
    ((1.5, 1.0, -1.0), 3.125, 2.5, False),
    ((1.0, 1.0, 1.0), 0.0, 0.0, False),
    ((1.1, 1.0, 1.05), 0.00125, 0.05, False),
]


@pytest.mark.parametrize(("case", "loss", "gradient", "clipped"), GOLDEN)
def test_the_value_loss_case_by_case(case, loss, gradient, clipped):
    v = tensor(case[0]).requires_grad_()
    found = ClippedValue(0.2)(v, tensor(case[1]), tensor(case[2]))
    assert (
        near(found.loss_T.detach(), [loss])
        and near(slope(found.loss_T.sum(), v), [gradient])
        and found.clipped_T.tolist() == [clipped]
    )
    free = ClippedValue(None)(v, tensor(case[1]), tensor(case[2]))
    assert near(free.loss_T.detach(), [(case[0] - case[2]) ** 2 / 2]) and near(
        slope(free.loss_T.sum(), v), [case[0] - case[2]]
    )


def test_explained_variance():
    returns = tensor(1.0, 2.0, 3.0, 6.0)
    assert explained_variance(returns, returns) == 1 and explained_variance(torch.full_like(returns, 9.0), returns) == 0
    assert explained_variance(returns + 5, returns) == 1  # a constant error is no lack of knowledge
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) is None and explained_variance(returns[:1], returns[:1]) is None


def test_the_steered_coefficient():
    """arXiv:1909.08593: a tenth of the horizon moves it by a fiftieth at most."""
    it = kl.Kl("k1", 0.1, "reward", target=6.0, horizon=1000)
    assert it.next_coef(6.0, 100) == pytest.approx(0.1) and it.next_coef(60.0, 100) == pytest.approx(0.102)
    assert it.next_coef(0.0, 100) == pytest.approx(0.098) and it.next_coef(6.6, 100) == pytest.approx(0.101)
    assert kl.Kl("k1", 0.1).next_coef(99.0, 100) == 0.1
    few = kl.Kl("k1", 0.1, "reward", target=6.0, horizon=10)
    assert few.next_coef(0.0, 100) == pytest.approx(0.08), "one step of ten horizons: never at or below 0"


def test_whitening_is_that_of_the_step_and_total():
    scored = a_step()
    found = advantages_of(table.PPO, scored)
    assert abs(float(found.mean())) < 1e-12 and float(found.var()) == pytest.approx(1.0)
    one = ScoredSamples(tensor(2.0), torch.tensor([0]), torch.tensor([1]), values_T=tensor(0.5))
    assert advantages_of(table.PPO, one).tolist() == [0.0] and returns_of(table.PPO, one).tolist() == [2.0]
    plain = replace(table.REINFORCE_PP, kl=kl.Kl())
    none = ScoredSamples(tensor(), torch.zeros(0).long(), torch.zeros(0).long(), values_T=tensor())
    assert advantages_of(table.PPO, none).shape == advantages_of(plain, none).shape == (0,)
    same = ScoredSamples(tensor(1, 1), torch.tensor([0, 1]), torch.tensor([2, 2]))
    assert advantages_of(plain, same).tolist() == [0.0] * 4


def test_what_is_not_written_earns_nothing_and_loses_nothing():
    """A sample without trainable tokens has a reward and no token to credit; shaping and KL leave the sums right."""
    scored = a_step()
    row = replace(table.PPO, kl=kl.Kl("k3", 0.2, "reward"))
    paid = with_shaped_rewards(row, scored)
    written = torch.tensor(LENGTHS) > 0
    assert near(paid.sum_by_sample(paid.earned_T)[written], paid.rewards_N[written])


def test_explain_says_where_the_kl_is():
    charged, pulls = (explain_objective(replace(table.PPO, kl=kl.Kl("k1", 0.1, where))) for where in ("reward", "loss"))
    assert "w·(c·l)\n" in charged and "each token pays 0.1·k of its reward" in charged and "critic    " in charged
    assert "w·(c·l + 0.1·k)\n" in pulls and "pays" not in pulls
    assert "critic    " not in explain_objective(table.GRPO) and "value: the row has no critic" in explain_objective(
        table.GRPO
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gae(gamma=1.1), "gamma = 1.1; it must lie in"),
        (lambda: Gae(lam=-0.1), "lam = -0.1; it must lie in"),
        (lambda: ClippedValue(0.0), "clip = 0.0; it must be positive"),
        (lambda: ClipReward(0.0), "limit = 0.0; it must be positive"),
        (
            lambda: table.resolve_algorithm({"kind": "grpo", "value": {"clip": 0.3}}),
            "has no effect: the row has no critic",
        ),
        (
            lambda: table.resolve_algorithm({"kind": "sft", "kl": {"coef": 0.1, "where": "reward"}}),
            "has no effect: it is part of the reward, and no reward is read",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
