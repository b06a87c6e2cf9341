"""Whole rows against the same formulas written one token at a time in float64: loss and gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from kits.algos import F64, STANDS_ALONE, Ragged, lively, near, slope, tensor
from kits.algos_oracle import naive
from rondel.algos import aggregate as aggregates
from rondel.algos import correction, group_advantages, kl, mask_corrections, table, turn_advantages
from rondel.algos.entropy import EntropyBonus
from rondel.algos.kl_regression import KlRegression
from rondel.algos.least_likely import LeastLikely
from rondel.algos.objective import objective, tokens_of
from rondel.algos.off_policy_surrogates import Tapered
from rondel.algos.question_value import QuestionValue
from rondel.algos.reward_transforms import Overlong
from rondel.algos.surrogate import Clip, SequenceRatio, TokenRatio
from rondel.algos.tokens import TokenBatch
from rondel.algos.trust_region_surrogates import DivergenceMask, MirrorDescent
from rondel.train.shaped_rewards import charge_advantages, with_shaped_rewards

LENGTHS = [3, 0, 7, 1, 10, 5, 2, 8, 4]
KLS = [kl.Kl(kind, 0.05) for kind in kl.ESTIMATORS] + [
    kl.Kl("k3", 0.05, unbiased=True),
    kl.Kl("k1", 0.05, through="k2"),
    kl.Kl("k3", 0.05, clamp=0.1),
    kl.Kl("k1", 0.05, through="k2", clamp=0.3),
]
CORRECTIONS = [
    correction.Importance(high=1.1),
    correction.Importance(action="clip", low=0.8, high=1.3),
    correction.Importance(action="mask", low=0.8, high=1.3),
    correction.Importance("sequence", "truncate", high=1.5, normalize="sequence"),
    correction.Importance("geometric", "mask", low=0.9, high=1.2, denominator="kept"),
    correction.Importance(high=1.5, reject="geometric", reject_low=0.7, reject_high=1.4, veto=0.3, normalize="token"),
    correction.OffPolicyMask(0.05, denominator="kept"),
    correction.Importance("none", reject="token", reject_low=0.8, reject_high=1.3, denominator="accepted"),
    correction.Importance(
        action="mask", low=0.8, high=1.3, reject="geometric", reject_low=0.9, reject_high=1.2, denominator="accepted"
    ),
]
BONUSES = [
    EntropyBonus(0.02),
    EntropyBonus(0.02, top=0.3),
    EntropyBonus(0.02, target=9.0),
    EntropyBonus(0.02, target=0.1),
]


def variants():
    """Every row as it stands, and with everything on, by turns with each penalty (`make sweeps`: with all); then the
    corners that no row has.
    """
    for number, row in enumerate(table.TABLE.values()):
        row = lively(row)
        yield pytest.param(row, id=row.name)
        takes_weights = "behavior" not in {*row.surrogate.reads, row.ratio.anchor}
        for i, penalty in enumerate(KLS if row.name not in STANDS_ALONE else ()):
            rule = CORRECTIONS[i % len(CORRECTIONS)] if takes_weights else correction.OffPolicyMask(0.05)
            full = replace(row, kl=penalty, entropy=BONUSES[i % len(BONUSES)], correction=rule)
            if isinstance(row.surrogate, Clip):
                full = replace(full, surrogate=replace(row.surrogate, dual=1.25))
            marks = [] if i == number % len(KLS) else [pytest.mark.sweep]
            yield pytest.param(full, id=f"{row.name}+{i}", marks=marks)
    for i, rule in enumerate(CORRECTIONS):
        for aggregate in (table.GRPO.aggregate, table.DAPO.aggregate, table.RLOO.aggregate):
            yield pytest.param(
                replace(table.GRPO, correction=rule, aggregate=aggregate),
                id=f"correction {i}, {type(aggregate).__name__}",
            )
    yield pytest.param(replace(table.GRPO, ratio=TokenRatio("behavior")), id="bypass")
    for name in ("grpo", "dr_grpo", "rloo"):
        row = table.TABLE[name].bounded(9)
        yield pytest.param(
            replace(row, kl=kl.Kl("k1", 0.3, "advantage", clamp=0.4)), id=f"{name}, the KL behind the baseline"
        )
    yield pytest.param(
        replace(table.GRPO, ratio=SequenceRatio("behavior"), surrogate=Clip(0.05, 0.05)), id="sequence bypass"
    )
    yield pytest.param(replace(lively(table.DPPO_TV), ratio=TokenRatio()), id="dppo at the proximal")
    yield pytest.param(
        replace(table.DPPO_TV, surrogate=DivergenceMask("tv", 0.1, 0.1, cap=1.1)).bounded(9), id="dppo with a cap"
    )
    for rule in (
        mask_corrections.BinaryKlMask(0.02, denominator="kept"),
        mask_corrections.VariationMask(0.1, denominator="kept"),
        mask_corrections.Freshness(2.0, oldest=2, denominator="kept"),
        mask_corrections.Freshness(3.0),
    ):
        yield pytest.param(replace(table.GRPO, correction=rule), id=str(rule))
    for how in (group_advantages.BatchNorm("rewards"), turn_advantages.StepGroups(0.7, 0.8)):
        yield pytest.param(replace(table.GRPO, advantage=how, aggregate=aggregates.PromptMean()), id=str(how))
    for number, (estimator, route) in enumerate(product(("mc", "topk", "binary"), ("token", "sequence"))):
        regression = KlRegression(estimator, route, 0.3, draws=3, top=(3, 5)[number % 2])
        yield pytest.param(replace(table.KLPO, surrogate=regression), id=f"klpo {estimator} {route}")
    for how in (QuestionValue(part="right", delta=0.3), QuestionValue(above=-0.1)):
        yield pytest.param(replace(table.DAPO.bounded(9), shaping=Overlong(10, 9), advantage=how), id=str(how))
    for rule in (LeastLikely(0.5, 0.5, 0.5), LeastLikely(1.0, 0.2, 3.0)):
        yield pytest.param(replace(table.OPSA, correction=rule), id=str(rule))
    yield pytest.param(replace(table.TOPR, surrogate=Tapered("token", above=0.5)), id="topr, token")
    yield pytest.param(replace(table.KIMI, surrogate=MirrorDescent(0.5, "token")), id="kimi, token")


@pytest.mark.slow
@pytest.mark.parametrize("row", list(variants()))
def test_a_row_is_its_formula_one_token_at_a_time(row):
    batch = Ragged.make(LENGTHS, 7)
    loss, gradient, _ = batch.loss(row)
    wanted, wanted_gradient = naive(row, batch)
    assert wanted_gradient.abs().max() > 1e-4, "the case must tell something"
    assert abs(float(loss - wanted)) <= 1e-10 and near(gradient, wanted_gradient)


def test_the_terms_are_what_they_are_called_and_carry_no_gradient():
    batch, row = Ragged.make(LENGTHS, 7), replace(table.GRPO, kl=kl.Kl("k2", 0.1))
    (terms,) = batch.loss(row)[2]
    logp, (old, mu, ref) = batch.logits_TV.log_softmax(-1)[:, 0], batch.others_3T
    gap = torch.where(batch.guided_N.repeat_interleave(batch.lengths_N), 0.0, old - mu)  # nobody drew a demonstration
    assert (
        near(terms["ratio"], (logp - old).exp())
        and near(terms["gap"], gap)
        and near(terms["kl"], (logp - ref).square() / 2)
    )
    assert not any(term.requires_grad for term in terms.values())


@pytest.mark.parametrize("row", table.TABLE.values(), ids=lambda row: row.name)
def test_what_a_row_leaves_out_would_have_changed_nothing(row):
    """A row without shaping, without a charge or without a correction does not enter them."""
    scored = Ragged.make(LENGTHS, 3).scored()
    row = row.bounded(12)
    shaped = with_shaped_rewards(row, scored)
    assert not row.takes_rewards or torch.equal(shaped.rewards_N, scored.rewards_N)
    assert not row.takes_rewards or torch.equal(shaped.token_rewards, scored.token_rewards)
    found_T = scored.spread_to_tokens(scored.rewards_N)
    assert row.charges_advantages or torch.equal(charge_advantages(row, found_T, scored), found_T)
    weight_T = None if row.corrects else row.correction(found_T, scored.sample_T, found_T)
    assert weight_T is None or torch.equal(weight_T, torch.ones_like(found_T))
    assert row.is_adaptive == (row.kl.is_adaptive or row.entropy.is_adaptive or row.advantage.remembers)


def test_decoupled_is_plain_when_the_behavior_was_the_anchor_and_is_right_when_it_was_stale():
    """M3. A two-armed bandit whose tokens were drawn from a stale mu: only the corrected gradient
    has the right mean.
    """
    arms, mu, payoff = tensor(0.4, -0.2), tensor(0.15, 0.85).log(), tensor(1, 0)

    def decided(row, tokens):
        """As if the surrogate had chosen both; the correction is that of the two alone."""
        own = tokens_of(row, tokens)
        weight_T = row.correction(own.log_weight, own.sample, own.advantages)
        return tokens.with_fields(selected=torch.ones(2), correction=weight_T)

    def step(row, behavior):
        logits = arms.clone().requires_grad_()
        logp = logits.log_softmax(0)
        loss, _ = objective(
            row,
            decided(
                row, TokenBatch(torch.arange(2), logprobs=logp, proximal=logp, behavior=behavior, advantages=payoff)
            ),
            behavior.exp(),
        )
        return slope(loss, logits)

    logits = arms.clone().requires_grad_()
    truth = slope(-(logits.softmax(0) * payoff).sum(), logits)
    decoupled = replace(table.GRPO, correction=correction.Importance(high=100.0))
    assert near(step(decoupled, mu), truth) and not near(step(table.GRPO, mu), truth, 0.05)
    assert near(step(decoupled, arms.log_softmax(0)), step(table.GRPO, arms.log_softmax(0)))
    # whoever spans behavior and policy in one ratio is right too: bypass, AIPO, M2PO
    for row in (replace(table.GRPO, ratio=TokenRatio("behavior"), surrogate=Clip(1.0, 100.0)), table.M2PO):
        assert near(step(row, mu), truth)
    assert near(step(replace(table.AIPO, surrogate=replace(table.AIPO.surrogate, cap=100.0)), mu), truth)


def test_the_matrix_of_anchors_and_corrections_is_four_losses():
    """M1: standard, with correction (decoupled), bypass; and the fourth, a correction beside
    a bypass, is refused: it would count twice.
    """
    batch = Ragged.make(LENGTHS, 3)
    standard, bypass = table.GRPO, replace(table.GRPO, ratio=TokenRatio("behavior"))
    losses = [
        float(batch.loss(row)[0])
        for row in (standard, replace(standard, correction=correction.Importance(high=9.0)), bypass)
    ]
    assert len({round(loss, 6) for loss in losses}) == 3
    with pytest.raises(table.ConfigError, match="weighed twice"):
        replace(bypass, correction=correction.Importance())
    with pytest.raises(table.ConfigError, match="weighed twice"):
        replace(table.TOPR, correction=correction.Importance())


@pytest.mark.slow
def test_demonstrations_teach_where_the_policy_never_succeeds():
    """A11. Three arms; the right one is hardly ever drawn, so on-policy rewards are all 0. With
    the demonstration in its group LUFFY finds it.
    """

    def train(guided: bool) -> float:
        logits = tensor(0.0, 0.0, -5.0).requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=2.0)
        for _ in range(100):
            logp = logits.log_softmax(0)
            picked = logp[[0, 1, 2]] if guided else logp[[0, 1, 0]]
            rewards = tensor(0, 0, 1) if guided else tensor(0, 0, 0)
            loss, _ = objective(
                table.LUFFY.bounded(1),
                TokenBatch(
                    torch.arange(3),
                    logprobs=picked,
                    proximal=picked,
                    behavior=picked.detach(),
                    advantages=rewards - rewards.mean(),
                    demonstration=torch.tensor([False, False, guided]),
                ),
                torch.full((3,), 1 / 3, dtype=F64),
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return math.exp(float(logits.detach().log_softmax(0)[2]))

    assert train(guided=True) > 0.9 and train(guided=False) < 0.01
