"""What is their own in the rows of flows, in closed form; tests/kits/algos_oracle.py has every row token by token."""

import math

import pytest
import torch

from kits.algos import scored, tensor, tokens
from rondel.algos.table import DDRL, FLOW_GRPO, GRPO, resolve_algorithm


def test_a_narrow_clip_holds_a_density_that_has_moved():
    """max(-A·r, -clip(r, 1 ± 1e-4)·A): a step passes a gradient until its density has moved by 1e-4 to its side."""
    x = tensor(0.0, 5e-5, 2e-4, -2e-4, -2e-4, 2e-4).requires_grad_()
    advantages = tensor(1, 1, 1, 1, -1, -1)
    found = FLOW_GRPO.surrogate(tokens(x, x, advantages))
    wanted = [
        max(-a * math.exp(r), -min(max(math.exp(r), 1 - 1e-4), 1 + 1e-4) * a)
        for r, a in zip(x.tolist(), advantages.tolist())
    ]
    assert found.loss_T.tolist() == pytest.approx(wanted, abs=1e-12)
    moves = torch.autograd.grad(found.loss_T.sum(), x)[0] != 0
    assert moves.tolist() == [True, True, False, True, False, True]


def test_ddrl_leaves_the_bad_before_it_tells_the_good_apart():
    rewards = tensor(0.0, 0.8, 0.9, 1.0, 5.0, 5.0)
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    found = DDRL.advantage(scored(rewards, group)).tolist()
    z = [(r - 0.675) / (rewards[:4].std().item() + 1e-6) for r in rewards[:4].tolist()]
    costs = [math.exp(-one) for one in z]
    assert found == pytest.approx([sum(costs) / 4 - cost for cost in costs] + [0.0, 0.0], abs=1e-12)
    assert found[1] - found[0] > 5 * (found[3] - found[1]) > 0 and sum(found) == pytest.approx(0, abs=1e-12)


def test_both_are_grpo_but_for_that():
    assert GRPO.needs == FLOW_GRPO.needs == DDRL.needs and FLOW_GRPO.aggregate == GRPO.aggregate
    assert DDRL.kl.coef == 0 and DDRL.surrogate == FLOW_GRPO.surrogate
    row = resolve_algorithm({"kind": "ddrl", "advantage": {"kind": "group_norm"}})
    assert row.advantage == GRPO.advantage and row.surrogate.low == 1e-4
