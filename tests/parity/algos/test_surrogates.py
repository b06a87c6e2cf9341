"""The losses of a token: golden values and analytic gradients."""

from __future__ import annotations

import math

import pytest
import torch

from kits.algos import F64, near, tensor, tokens
from rondel.algos import surrogate
from rondel.algos.masked_surrogates import ClipCov, Forking, KlCov
from rondel.algos.off_policy_surrogates import CappedWeight, Guided, SecondMoment, Tapered
from rondel.algos.trust_region_surrogates import (
    ClippedWeight,
    DivergenceMask,
    GeometricMean,
    MirrorDescent,
    SoftGate,
    binary_kl,
    binary_tv,
)

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
    logp, a, sample = (
        torch.randn(50, dtype=F64).requires_grad_(),
        torch.randn(50, dtype=F64),
        torch.zeros(50, dtype=torch.int64),
    )
    found = surrogate.Clip(0.0, 0.0)(tokens(logp, surrogate.TokenRatio()(logp - logp.detach(), sample), a))
    (slope,) = torch.autograd.grad(found.loss_T.sum(), logp)
    (wanted,) = torch.autograd.grad(surrogate.PolicyGradient()(tokens(logp, logp, a)).loss_T.sum(), logp)
    assert near(slope, wanted) and not found.clipped_T.any()


# -- analytic gradients
# -----------------------------------------------------------------------------------------------------

LOGP, OLD, A = tensor(-1.0, -0.4, -2.2, -0.7), tensor(-1.2, -0.5, -1.9, -0.7), tensor(0.8, 0.8, -0.5, -0.5)
SAMPLE = torch.tensor([0, 0, 1, 1])


def gradient(part, logp=LOGP, a=A, rule=None, **more):
    logp = logp.clone().requires_grad_()
    log_ratio = (rule or surrogate.TokenRatio())(logp - OLD[: len(logp)], SAMPLE[: len(logp)])
    found = part(tokens(logp, log_ratio, a, sample=SAMPLE[: len(logp)], **more))
    found.loss_T.sum().backward()
    return logp.grad, found


@pytest.mark.parametrize(
    "rule", [surrogate.SequenceRatio(), surrogate.SequenceTokenRatio()], ids=["gspo", "gspo_token"]
)
def test_gspo_pushes_every_token_by_the_ratio_of_its_sample(rule):
    """GSPO: d/dlogp_t of -sum_t s·A, s = exp(mean x), is -s·A for each of the sample's
    tokens; and 0 for all of a clipped sample.
    """
    s = torch.cat([(LOGP - OLD)[:2].mean().exp().expand(2), (LOGP - OLD)[2:].mean().exp().expand(2)])
    assert near(gradient(surrogate.Clip(1.0, 9.0), rule=rule)[0], -s * A)
    held, found = gradient(surrogate.Clip(0.1, 0.1), rule=rule)  # s = 1.16 and 0.86: both have gone far enough
    assert not held.any() and found.clipped_T.all()


def test_gspo_token_keeps_advantages_of_tokens_apart():
    a = tensor(0.8, -0.3, 0.5, 0.1)
    s = torch.cat([(LOGP - OLD)[:2].mean().exp().expand(2), (LOGP - OLD)[2:].mean().exp().expand(2)])
    assert near(gradient(surrogate.Clip(1.0, 9.0), a=a, rule=surrogate.SequenceTokenRatio())[0], -s * a)
    mixed = torch.cat([a[:2].mean().expand(2), a[2:].mean().expand(2)])
    assert near(gradient(surrogate.Clip(1.0, 9.0), a=a, rule=surrogate.SequenceRatio())[0], -s * mixed)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    r = (LOGP - OLD).exp()
    assert near(gradient(ClippedWeight(0.2, 0.1))[0], -r.clamp(0.8, 1.1) * A)
    assert (r.clamp(0.8, 1.1) != r).any() and near(gradient(ClippedWeight())[0], -r * A)


def test_sapo_is_the_policy_gradient_at_one_and_fades_away_from_it():
    r, tau = (LOGP - OLD).exp(), torch.where(A > 0, 1.0, 1.05).to(F64)
    g = torch.sigmoid(tau * (r - 1))
    assert near(gradient(SoftGate())[0], -4 * g * (1 - g) * r * A, 1e-7)
    assert near(gradient(SoftGate(), logp=OLD)[0], -A)


def test_gmpo_shares_the_geometric_mean_among_the_tokens_that_are_not_held():
    x = LOGP - OLD  # 0.2, 0.1 with A > 0; -0.3, 0 with A < 0
    found = gradient(GeometricMean(0.2, 0.15))[0]
    first, second = (0.15 + x[1]) / 2, (-0.2 + x[3]) / 2
    assert near(found, [0, float(-first.exp() * 0.8), 0, float(second.exp() * 0.5)])


def test_topr_learns_good_answers_whoever_wrote_them_and_bad_ones_as_far_as_the_policy_would_write_them():
    drift, score = tensor(-3.0, 1.0, -0.5, 0.2), tensor(1, 1, 0, 0)
    assert near(gradient(Tapered("token"), log_drift=drift, score=score)[0], -tensor(1, 1, math.exp(-0.5), 1) * A)
    u = math.exp(-0.3)  # of the trajectory: -0.5 + 0.2
    assert near(gradient(Tapered(), log_drift=drift, score=score)[0], -tensor(1, 1, u, u) * A)


def test_aipo_caps_above_and_leaves_the_other_side_open():
    drift = tensor(-3.0, 1.0, -0.5, 0.2)
    assert near(
        gradient(CappedWeight(2.0), log_drift=drift)[0], -tensor(math.exp(-3), 2, math.exp(-0.5), math.exp(0.2)) * A
    )


def test_luffy_weighs_a_demonstrated_token_by_how_undecided_the_policy_is_about_it():
    """A11: gamma·pi/(pi + gamma)², largest at pi = gamma."""
    pi, gamma = LOGP.exp(), 0.1
    guided = torch.tensor([True, True, False, False])
    found, said = gradient(Guided(0.2, 0.2, gamma=gamma), guided=guided)
    own = gradient(surrogate.Clip(0.2, 0.2))[0]
    assert (
        near(found[:2], (-gamma * pi / (pi + gamma).square() * A)[:2])
        and near(found[2:], own[2:])
        and not said.clipped_T[:2].any()
    )
    grid = torch.linspace(0.001, 1, 1000, dtype=F64)
    assert float(grid[(gamma * grid / (grid + gamma).square()).argmax()]) == pytest.approx(gamma)


def test_mirror_descent_is_stationary_where_the_log_ratio_is_the_advantage_over_tau():
    """Kimi k1.5: -A·logp + tau/2·S² has gradient -A + tau·S for each token, so it rests at S = A / tau."""
    x = LOGP - OLD
    whole = torch.cat([x[:2].sum().expand(2), x[2:].sum().expand(2)])
    assert near(gradient(MirrorDescent(0.7))[0], -A + 0.7 * whole)
    assert near(gradient(MirrorDescent(0.7, "token"))[0], -A + 0.7 * x)


# -- divergences
# ------------------------------------------------------------------------------------------------------------


def test_the_binary_divergences_are_those_of_two_outcomes():
    p, q = tensor(0.2, 0.9, 0.001, 0.5), tensor(0.4, 0.8, 0.004, 0.5)
    kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    assert near(binary_tv(p.log(), q.log()), (p - q).abs()) and near(binary_kl(p.log(), q.log()), kl)
    certain = binary_kl(tensor(0.0, -1e-9), tensor(-1e-9, 0.0))
    assert torch.isfinite(certain).all() and certain.abs().max() < 1e-6


def test_dppo_forgives_a_rare_token_its_ratio_and_holds_a_common_one():
    """Both have doubled. At probability 0.001 that is no distance; at 0.4 it is; and coming back is always free."""
    logp, old = tensor(0.002, 0.8, 0.4, 0.4).log().requires_grad_(), tensor(0.001, 0.4, 0.8, 0.8).log()
    found = DivergenceMask("tv")(tokens(logp, logp - old, tensor(1, 1, 1, -1)))
    found.loss_T.sum().backward()
    assert near(logp.grad, [-2, 0, -0.5, 0]) and found.clipped_T.tolist() == [False, True, False, True]


# -- choices over the whole update
# --------------------------------------------------------------------------------------------


def batch(n=4000, seed=0, **more):
    make = torch.Generator().manual_seed(seed)
    logp, a = -torch.rand(n, generator=make, dtype=F64) * 6, torch.randn(n, generator=make, dtype=F64)
    return tokens(logp, torch.zeros(n, dtype=F64), a, **more)


def test_clip_cov_silences_its_share_of_the_range_and_spreads_it_evenly():
    seen, part = batch(), ClipCov(share=0.01, least=1.0, most=5.0)
    chosen = part.select(seen)
    cov = (seen.advantages - seen.advantages.mean()) * (seen.logprobs - seen.logprobs.mean())
    inside = (cov > 1) & (cov < 5)
    assert int(chosen.sum()) == 40 and bool(inside[chosen].all())
    ranks = torch.searchsorted(cov[inside].sort().values, cov[chosen].sort().values)
    gaps = ranks.diff()
    assert int(gaps.max() - gaps.min()) <= 1  # as even as whole numbers allow: no part of the range is spared
    assert (
        int(ClipCov(share=1.0).select(seen).sum()) == int(inside.sum())
        and not ClipCov(least=80.0, most=90.0).select(seen).any()
    )


def test_kl_cov_holds_the_largest_covariances_only():
    seen, part = batch(), KlCov(share=0.002, coef=0.5)
    chosen = part.select(seen)
    cov = (seen.advantages - seen.advantages.mean()) * (seen.logprobs - seen.logprobs.mean())
    assert int(chosen.sum()) == 8 and cov[chosen].min() > cov[~chosen].max()
    assert int(KlCov(share=0.00249).select(seen).sum()) == 9  # of 9.96, as many as verl and ClipCov take
    found, _ = gradient(part, selected=torch.tensor([True, False, True, False]))
    x = LOGP - OLD
    assert near(found, -x.exp() * A + 0.5 * x.sign() * tensor(1, 0, 1, 0))


def test_forking_tokens_are_those_of_highest_entropy():
    seen = batch(entropy=torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=F64))
    chosen = Forking(top=0.2).select(seen)
    assert int(chosen.sum()) == 800 and seen.entropy[chosen].min() > seen.entropy[~chosen].max()
    found, said = gradient(Forking(), selected=torch.tensor([True, False, False, True]))
    assert near(found, gradient(surrogate.Clip())[0] * tensor(1, 0, 0, 1)) and said.clipped_T.tolist() == [
        True,
        True,
        True,
        False,
    ]  # the first by its ratio


def test_m2po_drops_as_few_outliers_as_bring_the_second_moment_down():
    gap = 0.3 * torch.randn(4000, generator=torch.Generator().manual_seed(2), dtype=F64)
    kept = SecondMoment(0.04).select(batch(log_weight=gap))
    assert gap[kept].square().mean() <= 0.04 < torch.cat([gap[kept], gap[~kept].abs().min()[None]]).square().mean()
    assert gap[kept].abs().max() < gap[~kept].abs().min() and 0.5 < kept.double().mean() < 1
    assert (
        SecondMoment(0.04).select(batch(log_weight=0.1 * gap)).all()
        and not SecondMoment(0.04).select(batch(log_weight=gap + 9)).any()
    )


@pytest.mark.parametrize("part", [ClipCov(), KlCov(), Forking(), SecondMoment()], ids=lambda part: type(part).__name__)
def test_nothing_is_chosen_of_nothing(part):
    assert part.select(batch(0)).tolist() == []
