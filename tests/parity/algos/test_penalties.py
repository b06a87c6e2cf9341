"""What the KL estimators estimate, what their gradients do, and the entropy bonus."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kits.algos import F64, Ragged, near, slope, tensor, tokens
from rondel.algos import kl, table
from rondel.algos.entropy import EntropyBonus
from rondel.algos.objective import objective
from rondel.algos.tokens import TokenBatch

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
        values = kl.Kl(kind)(p.log()[drawn], REFERENCE[drawn], p.log()[drawn])
        assert abs(values.mean() - wanted) < 4 * values.std() / math.sqrt(len(drawn)), kind
    assert abs(half_square - exact) > 0.02  # k2 is another number, unless x is small
    assert (kl.k3(p.log()[drawn] - REFERENCE[drawn]) >= 0).all()


def test_only_k2_has_the_gradient_of_the_kl():
    """In expectation over the policy's own draws, computed exactly: k1 is noise, k3
    follows the KL of the other direction.
    """
    logits, logp = toy()
    p = logp.detach().exp()
    forward = slope((logp.exp() * (logp - REFERENCE)).sum(), logits)
    reverse = slope((REFERENCE.exp() * (REFERENCE - logp)).sum(), logits)
    mean = {kind: slope((p * kl.Kl(kind)(logp, REFERENCE, logp)).sum(), logits) for kind in kl.ESTIMATORS}
    assert near(mean["k2"], forward, 1e-14)
    assert near(mean["k1"], torch.zeros(5), 1e-14) and forward.abs().max() > 0.1
    assert near(mean["k3"], reverse, 1e-14) and (reverse - forward).abs().max() > 0.01


def test_k3_stays_finite_when_the_policy_has_left_the_reference():
    x = tensor(-1000, 1000).requires_grad_()
    kl.k3(x).sum().backward()
    assert torch.isfinite(kl.k3(x)).all() and x.grad.tolist() == [0, 0]


def test_the_entropy_term_has_the_gradient_of_the_full_logits():
    logits = torch.randn(7, 5, dtype=F64).requires_grad_()
    logp = logits.log_softmax(-1)
    entropy_T, p = -(logp.exp() * logp).sum(-1), logp.detach().exp()
    row = replace(table.SFT, entropy=EntropyBonus(0.3))
    flat, weight, sample = (
        torch.zeros(7, dtype=F64),
        torch.full((7,), 0.5, dtype=F64),
        torch.zeros(7, dtype=torch.int64),
    )
    loss, _ = objective(row, TokenBatch(sample, logprobs=flat, entropy=entropy_T, proximal=flat), weight)
    wanted = 0.3 * 0.5 * p * (logp.detach() + entropy_T.detach()[:, None])
    assert near(torch.autograd.grad(loss, logits)[0], wanted)


def test_the_gradient_of_k2_can_be_had_with_the_value_of_k1_or_k3():
    logits, logp = toy()
    p = logp.detach().exp()
    exact = slope((logp.exp() * (logp - REFERENCE)).sum(), logits)
    for kind in ("k1", "k3"):
        values = kl.Kl(kind, through="k2")(logp, REFERENCE, logp)
        assert near(values.detach(), kl.Kl(kind)(logp, REFERENCE, logp).detach()) and near(
            slope((p * values).sum(), logits), exact, 1e-14
        )


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_estimators_are_right_for_tokens_of_any_policy(kind):
    """DeepSeek-V3.2. Drawn from mu, weighed by pi/mu with its gradient: value and gradient
    are those of the KL; unweighed neither is.
    """
    logits, logp = toy()
    mu = tensor(0.9, 0.3, -0.4, 0.0, -1.1).log_softmax(0)
    exact = (logp.exp() * (logp - REFERENCE)).sum()
    value = (mu.exp() * kl.Kl(kind, unbiased=True)(logp, REFERENCE, logp - mu)).sum()
    assert near(value, exact, 1e-14) and near(slope(value, logits), slope(exact, logits), 1e-14)
    plain = (mu.exp() * kl.Kl(kind)(logp, REFERENCE, logp - mu)).sum()
    assert not near(plain, exact, 0.01) and not near(slope(plain, logits), slope(exact, logits), 0.01)


def test_both_ways_to_the_right_gradient_at_once_are_refused():
    with pytest.raises(table.ConfigError, match="both give it twice"):
        kl.Kl("k3", 0.1, through="k2", unbiased=True)


def test_the_bonus_acts_on_the_undecided_tokens_or_only_below_its_target():
    def seen(entropy_T):
        flat = torch.zeros_like(entropy_T)
        return tokens(flat, flat, flat, entropy=entropy_T)

    entropy = tensor(0.1, 0.9, 0.5, 0.3, 0.5)
    # ties stand together
    assert EntropyBonus(1.0, top=0.4).select(seen(entropy)).tolist() == [False, True, True, False, True]
    assert (
        EntropyBonus(1.0, target=0.5).select(seen(entropy)).all()
        and not EntropyBonus(1.0, target=0.4).select(seen(entropy)).any()
    )
    assert EntropyBonus(1.0, target=0.4).select(seen(tensor())).tolist() == []
    plain, low = (
        replace(table.GRPO, entropy=EntropyBonus(0.1)),
        replace(table.GRPO, entropy=EntropyBonus(0.1, target=0.01)),
    )
    batch = Ragged.make([3, 4], 0)
    assert near(batch.loss(low)[1], batch.loss(table.GRPO)[1]) and not near(
        batch.loss(plain)[1], batch.loss(table.GRPO)[1]
    )
