"""`explain` tells the truth: its slopes are the gradients, its lines are what can change the loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kits.algos import lively, near, tensor, tokens
from rondel.algos import correction, kl, table
from rondel.algos.entropy import EntropyBonus
from rondel.algos.explanation import explain_objective
from rondel.algos.objective import objective
from rondel.algos.tokens import TokenBatch


@pytest.mark.parametrize("row", table.TABLE.values(), ids=table.TABLE)
@pytest.mark.parametrize("u,score", [(1.0, 1.0), (3.0, 0.0), (0.4, 0.0)])
def test_the_explained_slope_of_a_row_is_its_gradient(row, u, score):
    """At ratio 1, for a token that nothing singled out; u = policy / behavior."""
    logp, row, kept = tensor(-1.3).requires_grad_(), lively(row), torch.ones(1, dtype=torch.bool)
    seen = tokens(
        logp,
        row.ratio(logp - logp.detach(), torch.zeros(1).long()),
        tensor(0.7),
        log_drift=tensor(math.log(u)),
        score=tensor(score),
        top_logprobs=torch.zeros(1, 0),
        top_behavior=torch.zeros(1, 0),
    )
    if row.name in ("m2po", "forking"):  # these name the tokens they train
        seen = replace(seen, selected=kept)
    row.surrogate(seen).loss_T.sum().backward()
    names = {
        "exp": math.exp,
        "log": math.log,
        "beta": getattr(row.surrogate, "beta", None),
        "A": 0.7,
        "u": u,
        "min": min,
        "cap": getattr(row.surrogate, "cap", None),
        "good": score > 0,
        "kept": True,
    }
    slope = row.surrogate.slope.replace("·", "*").replace("where ", "if ").replace("^", "**").replace(", else", " else")
    assert near(logp.grad, [float(eval(slope, names))])


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
@pytest.mark.parametrize("knobs", [{}, {"through": "k2"}, {"unbiased": True}], ids=str)
def test_the_explained_slope_of_an_estimator_is_its_gradient(kind, knobs):
    logp, rule = tensor(-1.3).requires_grad_(), kl.Kl(kind, 1.0, **knobs)
    rule(logp, tensor(-0.8), logp - logp.detach()).sum().backward()
    assert near(logp.grad, [float(eval(rule.slope.replace("x²", "x**2"), {"x": -0.5, "exp": math.exp}))])


def test_explain_shows_the_effective_formula_and_only_that():
    row = replace(table.DAPO, kl=kl.Kl("k2", 0.01), entropy=EntropyBonus(0.001)).bounded(512)
    text = explain_objective(row)
    for line in (
        "loss      sum over the trainable tokens of w·(c·l + 0.01·k - 0.001·H)",
        "  l = max(-r·A, -clip(r, 0.8, 1.28)·A)",
        "  R = reward - 1·clip((length - 410) / 102, 0, 1)",
        "  w = 1 / trainable tokens",
        "gradient  at r = 1: sum of w·((c·(-A) + 0.01·(x))·∇logp - 0.001·∇H)",
        "knob      surrogate.high = 0.28    a ratio above 1 + high passes no gradient when A > 0",
    ):
        assert line in text.splitlines()
    assert "R = reward" not in explain_objective(
        table.SFT
    ) and "idle      shaping: no reward is read" in explain_objective(table.SFT)


def test_explain_says_what_the_denominators_count():
    masked = correction.Importance(action="mask")
    assert "what the correction keeps of" not in explain_objective(replace(table.GRPO, correction=masked))
    assert "  w counts what the correction keeps of the whole batch" in explain_objective(
        replace(table.GRPO, correction=replace(masked, denominator="kept"))
    )


def test_every_knob_of_every_row_is_explained():
    for row in table.TABLE.values():
        for line in explain_objective(row).splitlines():
            assert not line.startswith("knob") or len(line.split("    ", 2)[-1].strip()) > 10, line


def test_what_a_row_needs_and_the_batch_lacks_is_our_mistake_and_is_named():
    nothing = torch.zeros(0)
    row = replace(table.GRPO, kl=kl.Kl("k2", 0.1), correction=correction.Importance())
    with pytest.raises(AssertionError, match="grpo needs advantages, behavior_logprobs, ref_logprobs"):
        objective(row, TokenBatch(nothing.long(), logprobs=nothing), nothing)


def test_a_knob_is_shown_with_all_lines_of_its_meaning():
    text = explain_objective(replace(table.GRPO, correction=correction.Importance()))
    assert "its geometric mean; none: 1, so that it only rejects\n" in text


@pytest.mark.parametrize("row", table.TABLE.values(), ids=table.TABLE)
def test_every_knob_has_a_meaning(row):
    knobs = [line for line in explain_objective(row).splitlines() if line.startswith("knob")]
    assert all(line.split("    ")[-1].strip() for line in knobs), [k for k in knobs if not k.split("    ")[-1].strip()]
