"""A row and the tokens of a micro-batch -> the loss. The denominators are in the
weights, so the loss is a plain sum (law 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from inspect import cleandoc
from typing import TYPE_CHECKING

from rondel.algos.exponent import bounded_exp
from rondel.algos.precompute import NOTHING, UpdateMasks, tokens_of
from rondel.algos.tensors import Tensor

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm

SYMBOLS = {
    "shaping": "R",
    "advantage": "A",
    "distill": "d",
    "ratio": "r",
    "surrogate": "l",
    "correction": "c",
    "kl": "k",
    "entropy": "H",
    "aggregate": "w",
    "value": "m",
}


def objective(
    row: Algorithm,
    *,
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    proximal_T: Tensor,
    behavior_T: Tensor | None,
    ref_T: Tensor | None,
    advantages_T: Tensor | None,
    weight_T: Tensor,
    sample_T: Tensor,
    score_T: Tensor | None = None,
    guided_T: Tensor | None = None,
    decided: UpdateMasks = NOTHING,
    taught_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = sum_t w_t·(c_t·l_t + kl.coef·k_t + distill.coef·d_t - entropy.coef·H_t).  [T] each -> scalar, {name: [T]}.

    T are the trainable tokens only, of whole samples; the gradient flows through logprobs_T and entropy_T. `taught_T`
    is d, with its gradient; `score_T` is the reward of the token's sample, `guided_T` marks
    demonstrations, `decided` is what `ahead` found for these
    tokens. The terms are detached and per token, for metrics: ratio, clipped, correction; kl where a
    reference was given, taught where a teacher was,
    gap (log proximal - log behavior) where a behavior was. In the first update proximal_T may be
    logprobs_T itself: no gradient passes through it.
    """
    given = {
        "advantages": advantages_T,
        "behavior_logprobs": behavior_T,
        "ref_logprobs": ref_T,
        "teacher_hidden": taught_T,
    }
    missing = sorted(need for need, values_T in given.items() if need in row.needs and values_T is None)
    assert not missing, f"the row {row.name} needs {', '.join(missing)}, which the batch does not carry"
    assert "proximal_logprobs" not in row.needs or decided is not NOTHING, (
        f"the row {row.name} compares samples: ask `ahead` first"
    )

    proximal_T = proximal_T.detach()
    tokens = tokens_of(
        row,
        logprobs_T=logprobs_T,
        proximal_T=proximal_T,
        sample_T=sample_T,
        entropy_T=entropy_T,
        behavior_T=behavior_T,
        advantages_T=advantages_T,
        score_T=score_T,
        guided_T=guided_T,
        selected_T=decided.selected,
    )
    correction_T = decided.correction
    if correction_T is None:
        correction_T = row.correction(tokens.log_weight, sample_T, tokens.advantages)
    surrogate = row.surrogate(tokens)
    token_T = correction_T * surrogate.loss_T
    counts_T = 1.0 if decided.counts is None else decided.counts
    terms = {"ratio": bounded_exp(tokens.log_ratio), "clipped": surrogate.clipped_T, "correction": correction_T}
    if behavior_T is not None:
        terms["gap"] = tokens.log_weight
    if ref_T is not None:
        terms["kl"] = row.kl(logprobs_T, ref_T, logprobs_T - logprobs_T.detach() + tokens.log_drift)
    if row.kl.in_loss:
        token_T = token_T + counts_T * row.kl.coef * terms["kl"]
    if taught_T is not None:
        terms["taught"] = taught_T
        token_T = token_T + counts_T * row.distill.coef * taught_T
    if row.entropy.coef:
        assert entropy_T is not None, (
            f"the row {row.name} has entropy.coef = {row.entropy.coef}, but no entropy was computed"
        )
        bonus_T = counts_T * row.entropy(entropy_T)
        token_T = token_T - (bonus_T if decided.undecided is None else decided.undecided * bonus_T)
    return (weight_T * token_T).sum(), {name: term_T.detach() for name, term_T in terms.items()}


def explain_objective(row: Algorithm) -> str:
    """The effective formula in plain text: loss, what its letters stand for, gradient at ratio 1, knobs."""
    idle = {path for path in row.idle if "." not in path} | {
        name for name in ("kl", "entropy", "distill") if not getattr(row, name).coef
    }
    shown = {family: part for family, part in row.parts.items() if family not in idle}
    penalty = f" + {row.kl.coef:g}·k" if row.kl.in_loss else ""
    penalty += f" + {row.distill.coef:g}·d" if row.distill.coef and not row.distill.charged else ""
    bonus = f" - {row.entropy.coef:g}·H" if row.entropy.coef else ""
    slope = f" + {row.kl.coef:g}·({row.kl.slope})" if row.kl.in_loss else ""
    cost = [f"  each token pays {row.kl.coef:g}·k of its reward, with logp of the behavior"] if row.kl.in_reward else []
    cost += (
        [f"  each token pays {row.kl.coef:g}·k of its own and of those behind it, after the baseline"]
        if row.kl.in_advantage
        else []
    )
    critic = (
        ["critic    its own loss: sum of w·m over the same tokens, with V = v when the step began"]
        if "values" in row.needs
        else []
    )
    push = f" - {row.entropy.coef:g}·∇H" if row.entropy.coef else ""
    push += f" + {row.distill.coef:g}·∇d" if row.distill.coef and not row.distill.charged else ""
    kept = getattr(row.correction, "denominator", "all") != "all"
    lines = [
        f"{row.name}  ({row.paper})",
        f"loss      sum over the trainable tokens of w·(c·l{penalty}{bonus})",
        *(f"  {SYMBOLS[family]} = {part}" for family, part in shown.items()),
        *cost,
        f"  w counts {'what the correction keeps of ' if kept else ''}the whole batch before the first forward pass: micro-batches and ranks cannot change it",
        f"gradient  at r = 1: sum of w·((c·({getattr(row.surrogate, 'slope', 'dl/dlogp')}){slope})·∇logp{push})",
        *critic,
        *(
            ["masked    answers that the token limit cut off: no gradient; their rewards stay in the baseline"]
            if row.mask_truncated
            else []
        ),
        f"groups    {'trained if they pass: ' + ', '.join(row.filters) if row.filters else 'all are trained'}",
        f"needs     {', '.join(sorted(row.needs)) or 'nothing beside the tokens'}",
        *_describe_knobs(row),
        *(
            f"idle      {', '.join(path for path, other in row.idle.items() if other == why)}: {why}"
            for why in dict.fromkeys(row.idle.values())
        ),
    ]
    return "\n".join(lines)


def _describe_knobs(row: Algorithm) -> Iterator[str]:
    """One line for every field that can change the loss; its meaning is its line in the docstring."""
    for family, part in row.parts.items():
        meanings = dict(
            line.split("    ", 1) for line in cleandoc(type(part).__doc__ or "").splitlines() if "    " in line
        )
        for knob in (f.name for f in fields(part)):
            if family not in row.idle and f"{family}.{knob}" not in row.idle:
                yield f"knob      {family}.{knob} = {getattr(part, knob)}    {meanings.get(knob, '').strip()}"
