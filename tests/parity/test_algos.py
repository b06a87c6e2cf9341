"""The mathematics against the same formulas written one token at a time, in float64: loss and gradient; and against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algos_kit import F64, near, scored, slope, tensor, tokens
from torch import Tensor

from rondel.algos import advantage, aggregate, correction, kl, ratio, surrogate, table
from rondel.algos.entropy import EntropyBonus
from rondel.algos.objective import explain, objective
from rondel.algos.shaping import NoShaping, Overlong

# -- advantages: closed forms -------------------------------------------------------------------------------------------

REWARDS, GROUPS = tensor(1, 7, 0, 0, 5, 1, 2, 5), torch.tensor([9, 4, 9, 9, -2, 9, 4, -2])  # groups 9: 1 0 0 1, 4: 7 2, -2: 5 5
UP, DOWN = 0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)  # sqrt(1/3) is the unbiased std of 1 0 0 1
WIDE = 2.5 / (math.sqrt(12.5) + 1e-6)
CLOSED_FORMS = [
    (advantage.GroupNorm(), [UP, WIDE, DOWN, DOWN, 0, UP, -WIDE, 0]),
    (advantage.GroupCenter(), [0.5, 2.5, -0.5, -0.5, 0, 0.5, -2.5, 0]),
    (advantage.LeaveOneOut(), [1 - 1 / 3, 7 - 2, 0 - 2 / 3, 0 - 2 / 3, 0, 1 - 1 / 3, 2 - 7, 0]),
    (advantage.Raw(), [1, 7, 0, 0, 5, 1, 2, 5]),
    (advantage.Constant(1.0), [1] * 8),
]


@pytest.mark.parametrize("rule,wanted", CLOSED_FORMS, ids=[type(rule).__name__ for rule, _ in CLOSED_FORMS])
def test_advantages_are_their_closed_forms(rule, wanted):
    assert near(rule(scored(REWARDS, GROUPS)), wanted, 1e-14)


def test_a_constant_group_is_exactly_zero_even_where_its_mean_rounds():
    """Seven float32 rewards of 0.1 do not average to 0.1; eps alone would turn the rounding into an advantage of 1 %."""
    rewards, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert (rewards - rewards.sum() / 7).abs().max() > 0
    assert advantage.GroupNorm()(scored(rewards, group)).tolist() == [0.0] * 7


def test_eps_matters_exactly_where_a_group_nearly_agrees():
    rewards, group = tensor(0.5, 0.5 + 2e-6), torch.tensor([0, 0])
    std = math.sqrt(2) * 1e-6
    for eps in (1e-9, 1e-6, 1e-4):  # the spread of the peers' defaults
        assert near(advantage.GroupNorm(eps)(scored(rewards, group)), [-1e-6 / (std + eps), 1e-6 / (std + eps)], 1e-9)


# -- the clip: 12 golden cases --------------------------------------------------------------------------------------------

GOLDEN = [  # r, A, loss, dloss/dlogp, clipped; low 0.2, high 0.28, dual 3
    (1.00, +2.0, -2.00, -2.0, False),
    (1.00, -2.0, +2.00, +2.0, False),
    (1.10, +2.0, -2.20, -2.2, False),
    (1.10, -2.0, +2.20, +2.2, False),
    (1.50, +2.0, -2.56, 0.0, True),  # enough of a good thing
    (1.50, -2.0, +3.00, +3.0, False),  # a bad token that grew: all of it comes back
    (0.90, +2.0, -1.80, -1.8, False),
    (0.90, -2.0, +1.80, +1.8, False),
    (0.50, +2.0, -1.00, -1.0, False),  # a good token that shrank
    (0.50, -2.0, +1.60, 0.0, True),  # enough of a bad thing
    (4.00, -2.0, +6.00, 0.0, True),  # the dual bound: -3·A
    (4.00, +2.0, -2.56, 0.0, True),  # which is for A < 0 only
]


@pytest.mark.parametrize("r,a,loss,slope,clipped", GOLDEN)
def test_the_golden_clip_cases(r, a, loss, slope, clipped):
    logp = tensor(math.log(r) - 1.7).requires_grad_()
    found = surrogate.Clip(low=0.2, high=0.28, dual=3.0)(tokens(logp, logp + 1.7, tensor(a)))
    found.loss_T.sum().backward()
    assert near(found.loss_T, [loss]) and near(logp.grad, [slope]) and found.clipped_T.tolist() == [clipped]


def test_without_the_dual_bound_a_bad_token_is_open_upwards():
    found = surrogate.Clip()(tokens(tensor(0), tensor(math.log(4.0)), tensor(-2)))
    assert near(found.loss_T, [8.0]) and not found.clipped_T.any()


def test_clipped_means_exactly_that_no_gradient_passes():
    torch.manual_seed(0)
    for bounds in (surrogate.Clip(), surrogate.Clip(0.1, 0.5, 2.0), surrogate.Clip(1.0, 0.0)):
        logp = (8 * torch.randn(4000, dtype=F64)).requires_grad_()
        found = bounds(tokens(logp, logp, torch.randn(4000, dtype=F64)))
        found.loss_T.sum().backward()
        assert (found.clipped_T == (logp.grad == 0)).all()


def test_a_log_ratio_of_a_thousand_is_finite_and_passes_no_gradient():
    logp = tensor(1000, -1000).requires_grad_()
    found = surrogate.Clip()(tokens(logp, logp, tensor(-1, 1)))
    found.loss_T.sum().backward()
    assert near(found.loss_T, [math.exp(20), -math.exp(-20)], 1e-3) and logp.grad.tolist() == [0, 0]


def test_on_the_first_update_clip_is_the_policy_gradient():
    logp, a, sample = torch.randn(50, dtype=F64).requires_grad_(), torch.randn(50, dtype=F64), torch.zeros(50, dtype=torch.int64)
    found = surrogate.Clip(0.0, 0.0)(tokens(logp, ratio.TokenRatio()(logp - logp.detach(), sample), a))
    (slope,) = torch.autograd.grad(found.loss_T.sum(), logp)
    (wanted,) = torch.autograd.grad(surrogate.PolicyGradient()(tokens(logp, logp, a)).loss_T.sum(), logp)
    assert near(slope, wanted) and not found.clipped_T.any()


# -- KL: what each estimator estimates, and what its gradient does ---------------------------------------------------------

LOGITS, REFERENCE = tensor(0.3, -1.0, 1.2, 0.0, -0.4), tensor(-0.2, 0.1, 0.8, -0.7, 0.5).log_softmax(0)


def toy() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    return logits, logits.log_softmax(0)


def test_monte_carlo_means_against_the_exact_kl():
    _, logp = toy()
    p = logp.detach().exp()
    exact, half_square = (p * (p.log() - REFERENCE)).sum(), (p * (p.log() - REFERENCE).square()).sum() / 2
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    for kind, wanted in (("k1", exact), ("k2", half_square), ("k3", exact)):
        values = kl.Kl(kind)(p.log()[drawn], REFERENCE[drawn])
        assert abs(values.mean() - wanted) < 4 * values.std() / math.sqrt(len(drawn)), kind
    assert abs(half_square - exact) > 0.02  # k2 is another number, unless x is small
    assert (kl.k3(p.log()[drawn] - REFERENCE[drawn]) >= 0).all()


def test_only_k2_has_the_gradient_of_the_kl():
    """In expectation over the policy's own draws, computed exactly: k1 is noise, k3 follows the KL of the other direction."""
    logits, logp = toy()
    p = logp.detach().exp()
    forward = slope((logp.exp() * (logp - REFERENCE)).sum(), logits)
    reverse = slope((REFERENCE.exp() * (REFERENCE - logp)).sum(), logits)
    mean = {kind: slope((p * kl.Kl(kind)(logp, REFERENCE)).sum(), logits) for kind in kl.ESTIMATORS}
    assert near(mean["k2"], forward, 1e-14)
    assert near(mean["k1"], torch.zeros(5), 1e-14) and forward.abs().max() > 0.1
    assert near(mean["k3"], reverse, 1e-14) and (reverse - forward).abs().max() > 0.01


def test_k3_stays_finite_when_the_policy_has_left_the_reference():
    x = tensor(-1000, 1000).requires_grad_()
    kl.k3(x).sum().backward()
    assert torch.isfinite(kl.k3(x)).all() and x.grad.tolist() == [0, 0]


# -- correction, shaping, entropy -----------------------------------------------------------------------------------------


def test_token_tis_truncates_above_and_carries_no_gradient():
    log_weight = tensor(0, math.log(1.5), math.log(2.5), math.log(0.1), 900).requires_grad_()
    weight = correction.TokenTIS(2.0)(log_weight, torch.zeros(5, dtype=torch.int64), log_weight)
    assert near(weight, [1, 1.5, 2, 0.1, 2]) and not weight.requires_grad


def test_truncation_adds_bias_and_takes_variance():
    """Drawing from mu and asking for the mean of f under pi: exact without the cap, biased towards mu with it."""
    mu, pi, f = tensor(0.7, 0.2, 0.1), tensor(0.1, 0.2, 0.7), tensor(0, 1, 3)
    sample = torch.zeros(3, dtype=torch.int64)
    log_weight, truth = (pi / mu).log(), (pi * f).sum()
    means, spreads = [], []
    for cap in (100.0, 2.0, 1.0):
        value = correction.TokenTIS(cap)(log_weight, sample, log_weight) * f
        means.append((mu * value).sum())
        spreads.append((mu * value.square()).sum() - means[-1] ** 2)
    assert near(means[0], truth) and means[0] > means[1] > means[2]
    assert spreads[0] > spreads[1] > spreads[2]


@pytest.mark.parametrize("length,penalty", [(80, 0.0), (90, 0.5), (100, 1.0), (10, 0.0), (140, 1.0)])
def test_overlong_is_piecewise_linear(length, penalty):
    found = Overlong(max_tokens=100, buffer=20, factor=1.0)(scored(tensor(0.25), lengths=torch.tensor([length])))
    assert near(found, [0.25 - penalty])


def test_overlong_takes_the_papers_share_as_its_buffer():
    lengths = torch.tensor([16384, 18432, 20480])
    assert near(Overlong(max_tokens=20480)(scored(torch.zeros(3, dtype=F64), lengths=lengths)), [0, -0.5, -1])


def test_the_entropy_term_has_the_gradient_of_the_full_logits():
    logits = torch.randn(7, 5, dtype=F64).requires_grad_()
    logp = logits.log_softmax(-1)
    entropy_T, p = -(logp.exp() * logp).sum(-1), logp.detach().exp()
    row = replace(table.SFT, entropy=EntropyBonus(0.3))
    flat, weight, sample = torch.zeros(7, dtype=F64), torch.full((7,), 0.5, dtype=F64), torch.zeros(7, dtype=torch.int64)
    loss, _ = objective(
        row, logprobs_T=flat, entropy_T=entropy_T, proximal_T=flat, behavior_T=None, ref_T=None, advantages_T=None,
        weight_T=weight, sample_T=sample,
    )  # fmt: skip
    wanted = 0.3 * 0.5 * p * (logp.detach() + entropy_T.detach()[:, None])
    assert near(torch.autograd.grad(loss, logits)[0], wanted)


# -- whole rows, against one token at a time ------------------------------------------------------------------------------


def naive(row, logp, entropy, old, mu, ref, rewards, group, lengths):
    """Every formula of `row` again, in Python floats and loops; only logp and entropy stay tensors, for their gradient."""
    members = {g: [i for i in range(len(group)) if group[i] == g] for g in group}
    shaped, advantages = list(rewards), []
    if isinstance(row.shaping, Overlong):
        cap, width = row.shaping.max_tokens, row.shaping.buffer
        shaped = [r - row.shaping.factor * min(max(n - (cap - width), 0) / width, 1) for r, n in zip(rewards, lengths, strict=True)]
    for i, g in enumerate(group):
        peers = [shaped[j] for j in members[g]]
        mean, n = sum(peers) / len(peers), len(peers)
        std = math.sqrt(sum((r - mean) ** 2 for r in peers) / (n - 1)) if n > 1 else 0.0
        advantages.append({
            "GroupNorm": (shaped[i] - mean) / (std + 1e-6),
            "GroupCenter": shaped[i] - mean,
            "LeaveOneOut": shaped[i] - (sum(peers) - shaped[i]) / (n - 1) if n > 1 else 0.0,
            "Raw": shaped[i],
            "Constant": 1.0,
        }[type(row.advantage).__name__])  # fmt: skip
    counted = sum(n > 0 for n in lengths)
    total, t = 0.0, 0
    for i, n in enumerate(lengths):
        inner = 0.0
        for _ in range(n):
            a, match = advantages[i], type(row.surrogate).__name__
            r = (logp[t] - old[t]).exp()
            if match == "Clip":
                low, high = 1 - row.surrogate.low, 1 + row.surrogate.high
                held = r if low <= r.item() <= high else torch.tensor(low if r.item() < low else high, dtype=F64)
                loss = max(-r * a, -held * a, key=Tensor.item)
                if row.surrogate.dual is not None and a < 0 and loss.item() > -row.surrogate.dual * a:
                    loss = torch.tensor(-row.surrogate.dual * a, dtype=F64)
            else:
                loss = -logp[t] * (a if match == "PolicyGradient" else 1.0)
            if isinstance(row.correction, correction.TokenTIS):
                loss = loss * min(math.exp(float(old[t] - mu[t])), row.correction.cap)
            x = logp[t] - ref[t]
            penalty = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() - 1 + x}[row.kl.kind]
            inner = inner + loss + row.kl.coef * penalty - row.entropy.coef * entropy[t]
            t += 1
        total = (
            total
            + inner
            / {
                "TokenMean": sum(lengths),
                "SeqMeanTokenMean": counted * max(n, 1),
                "SeqMeanTokenSum": counted,
                "FixedNorm": counted * (row.aggregate.length if isinstance(row.aggregate, aggregate.FixedNorm) else 1),
            }[type(row.aggregate).__name__]
        )
    return total


def variants():
    """Every row as it stands, and every row with everything on."""
    for row in table.TABLE.values():
        if getattr(row.advantage, "per_token", False):
            continue  # tests/parity/test_ppo.py
        row = replace(row, shaping=Overlong(10, 4) if isinstance(row.shaping, Overlong) else NoShaping()).bounded(9)
        yield pytest.param(row, id=row.name)
        for kind in kl.ESTIMATORS:
            full = replace(row, correction=correction.TokenTIS(1.1), kl=kl.Kl(kind, 0.05), entropy=EntropyBonus(0.02))
            if isinstance(row.surrogate, surrogate.Clip):
                full = replace(full, surrogate=replace(row.surrogate, dual=1.25))
            yield pytest.param(full, id=f"{row.name}+tis+{kind}+entropy")


@pytest.mark.parametrize("row", list(variants()))
def test_a_row_is_its_formula_one_token_at_a_time(row):
    make = torch.Generator().manual_seed(7)
    lengths = [3, 0, 7, 1, 10, 5, 2, 8, 4]
    group = [5, 5, 5, 1, 1, 8, 3, 3, 3]
    rewards = [1.0, 0.0, 0.3, 1.0, -0.5, 2.0, 0.7, 0.7, 0.7]
    t = sum(lengths)
    logits = torch.randn(t, 6, generator=make, dtype=F64).requires_grad_()
    logps = logits.log_softmax(-1)
    logp, entropy = logps[:, 0], -(logps.exp() * logps).sum(-1)
    old, mu, ref = (logp.detach() + 0.3 * torch.randn(t, generator=make, dtype=F64) for _ in range(3))

    sample, lengths_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.tensor(lengths)
    advantages_T = row.advantages_T(scored(torch.tensor(rewards, dtype=F64), torch.tensor(group), lengths_N))
    loss, terms = objective(
        row, logprobs_T=logp, entropy_T=entropy, proximal_T=old, behavior_T=mu, ref_T=ref, advantages_T=advantages_T,
        weight_T=row.aggregate(lengths_N)[sample], sample_T=sample,
    )  # fmt: skip
    wanted = naive(row, logp, entropy, old, mu, ref, rewards, group, lengths)
    assert abs((loss - wanted).item()) <= 1e-10
    assert near(slope(loss, logits), slope(wanted, logits))
    assert near(terms["ratio"], (logp - old).exp()) and near(terms["gap"], old - mu)
    assert near(terms["kl"], row.kl(logp.detach(), ref)) and not any(term.requires_grad for term in terms.values())


def test_decoupled_is_plain_when_the_behavior_was_the_anchor_and_is_right_when_it_was_stale():
    """M3. A two-armed bandit whose tokens were drawn from a stale mu: only the corrected gradient has the right mean."""
    arms, mu, payoff = tensor(0.4, -0.2), tensor(0.15, 0.85).log(), tensor(1, 0)
    sample = torch.arange(2)

    def step(row, behavior):
        logits = arms.clone().requires_grad_()
        logp = logits.log_softmax(0)
        loss, _ = objective(
            row, logprobs_T=logp, entropy_T=None, proximal_T=logp, behavior_T=behavior, ref_T=None, advantages_T=payoff,
            weight_T=behavior.exp(), sample_T=sample,
        )  # fmt: skip
        return slope(loss, logits)

    logits = arms.clone().requires_grad_()
    truth = slope(-(logits.softmax(0) * payoff).sum(), logits)
    decoupled = replace(table.GRPO, correction=correction.TokenTIS(cap=100.0))
    assert near(step(decoupled, mu), truth) and not near(step(table.GRPO, mu), truth, 0.05)
    assert near(step(decoupled, arms.log_softmax(0)), step(table.GRPO, arms.log_softmax(0)))


# -- explain tells the truth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [surrogate.Clip(), surrogate.PolicyGradient(), surrogate.LogLikelihood()], ids=str)
def test_the_explained_slope_of_a_surrogate_is_its_gradient(part):
    logp = tensor(-1.3).requires_grad_()
    part(tokens(logp, logp - logp.detach(), tensor(0.7))).loss_T.sum().backward()
    assert near(logp.grad, [float(eval(part.slope, {"A": 0.7}))])


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_the_explained_slope_of_an_estimator_is_its_gradient(kind):
    logp = tensor(-1.3).requires_grad_()
    kl.Kl(kind, 1.0)(logp, tensor(-0.8)).sum().backward()
    assert near(logp.grad, [float(eval(kl.Kl(kind).slope, {"x": -0.5, "exp": math.exp}))])


def test_explain_shows_the_effective_formula_and_only_that():
    row = replace(table.DAPO, kl=kl.Kl("k2", 0.01), entropy=EntropyBonus(0.001)).bounded(512)
    text = explain(row)
    for line in (
        "loss      sum over the trainable tokens of w·(c·l + 0.01·k - 0.001·H)",
        "  l = max(-r·A, -clip(r, 0.8, 1.28)·A)",
        "  R = reward - 1·clip((length - 410) / 102, 0, 1)",
        "  w = 1 / trainable tokens",
        "gradient  at r = 1: sum of w·((c·(-A) + 0.01·(x))·∇logp - 0.001·∇H)",
        "knob      surrogate.high = 0.28    a ratio above 1 + high passes no gradient when A > 0",
    ):
        assert line in text.splitlines()
    assert "R = reward" not in explain(table.SFT) and "idle      shaping: no reward is read" in explain(table.SFT)


def test_every_knob_of_every_row_is_explained():
    for row in table.TABLE.values():
        for line in explain(row).splitlines():
            assert not line.startswith("knob") or len(line.split("    ", 2)[-1].strip()) > 10, line


def test_what_a_row_needs_and_the_batch_lacks_is_our_mistake_and_is_named():
    nothing = torch.zeros(0)
    row = replace(table.GRPO, kl=kl.Kl("k2", 0.1), correction=correction.TokenTIS())
    with pytest.raises(AssertionError, match="grpo needs advantages, behavior_logprobs, ref_logprobs"):
        objective(
            row, logprobs_T=nothing, entropy_T=None, proximal_T=nothing, behavior_T=None, ref_T=None, advantages_T=None,
            weight_T=nothing, sample_T=nothing.long(),
        )  # fmt: skip
