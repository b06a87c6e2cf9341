"""A row and the tokens of a micro-batch -> the loss. The denominators are in the weights, so the loss is a plain sum
(law 3).

Samples are never cut, so what looks at one sample at a time can wait for the micro-batch. What compares samples (a mean
over all weights, the tokens of largest covariance) is decided over the whole update before its first micro-batch, from
the proximal logprobs (`decide_update`): its part of the row needs "proximal_logprobs".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from inspect import cleandoc
from typing import TYPE_CHECKING

from rondel.algos.distill import GatedDistill
from rondel.algos.exponent import bounded_exp
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import TokenBatch, Tokens

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


# what a row may need of each token, and the field of TokenBatch that holds it
FIELDS = {
    "advantages": "advantages",
    "behavior_logprobs": "behavior",
    "ref_logprobs": "reference",
    "ages": "age",
    "teacher_hidden": "full_kl",
    "behavior_top": "top_logprobs",
    "ref_means": "step_kl",
}


def objective(row: Algorithm, batch: TokenBatch, weight_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """L = sum_t w_t·(c_t·l_t + kl.coef·k_t + distill.coef·d_t + sum of terms - entropy.coef·H_t).  -> scalar, {name:
    [T]}.

    The gradient flows through `logprobs`, `entropy`, `top_logprobs`, `full_kl` (d) and `step_kl` (k) of the batch. The
    terms are detached and per token, for metrics: ratio, clipped, correction, truncated where a correction has a bound;
    kl where a reference was given, taught where a teacher was, gap
    (log proximal - log behavior) where a behavior was, and each loss term of the row by its name.
    """
    missing = sorted(need for need, name in FIELDS.items() if need in row.needs and getattr(batch, name) is None)
    assert not missing, f"the row {row.name} needs {', '.join(missing)}, which the batch does not carry"
    assert "proximal_logprobs" not in row.needs or batch.correction is not None, (
        f"the row {row.name} compares samples: ask `decide_update` first"
    )
    assert batch.logprobs is not None
    tokens = tokens_of(row, batch)
    correction_T = batch.correction
    if correction_T is None:
        correction_T = row.correction.weights_of(tokens) if row.corrects else torch.ones_like(tokens.log_weight)
    surrogate = row.surrogate(tokens)
    token_T = correction_T * surrogate.loss_T
    counts_T = 1.0 if batch.counts is None else batch.counts
    terms = {"ratio": bounded_exp(tokens.log_ratio), "clipped": surrogate.clipped_T, "correction": correction_T}
    if row.corrects:
        truncated_T = row.correction.truncated(tokens.log_weight.detach(), tokens.sample, correction_T)
        terms |= {} if truncated_T is None else {"truncated": truncated_T.to(correction_T.dtype)}
    if batch.behavior is not None:
        terms["gap"] = tokens.log_weight
    if batch.reference is not None:
        drift_T = batch.logprobs - batch.logprobs.detach() + tokens.log_drift
        terms["kl"] = row.kl(batch.logprobs, batch.reference, drift_T)
    if batch.step_kl is not None:
        terms["kl"] = batch.step_kl
    if row.kl.in_loss:
        token_T = token_T + counts_T * row.kl.coef * terms["kl"]
    if batch.full_kl is not None:
        terms["taught"] = batch.full_kl
        token_T = token_T + counts_T * row.distill.coef * batch.full_kl
    if isinstance(row.distill, GatedDistill) and row.distill.coef:
        terms["taught"] = row.distill.term(batch)
        token_T = token_T + counts_T * row.distill.coef * terms["taught"]
    for term in row.terms:
        terms[f"term_{term.name}"] = term(batch)
        token_T = token_T + counts_T * term.coef * terms[f"term_{term.name}"]
    if row.entropy.coef:
        assert batch.entropy is not None, (
            f"the row {row.name} has entropy.coef = {row.entropy.coef}, but no entropy was computed"
        )
        bonus_T = counts_T * row.entropy(batch.entropy)
        token_T = token_T - (bonus_T if batch.entropy_mask is None else batch.entropy_mask * bonus_T)
    return (weight_T * token_T).sum(), {name: term_T.detach() for name, term_T in terms.items()}


def tokens_of(row: Algorithm, batch: TokenBatch) -> Tokens:
    """The tokens as the parts of a row see them; needs `logprobs`, and `proximal` or takes the log-probabilities for
    it.

    In the first update the proximal policy may be the policy itself: no gradient passes through it.
    """
    assert batch.logprobs is not None
    proximal_T = (batch.logprobs if batch.proximal is None else batch.proximal).detach()
    drawn_T = proximal_T if batch.behavior is None else batch.behavior
    flat_T = torch.zeros_like(proximal_T)
    if batch.demonstration is not None:  # nobody drew a demonstration
        drawn_T = torch.where(batch.demonstration.bool(), proximal_T, drawn_T)
    anchor_T = {"behavior": drawn_T, "reference": batch.reference}.get(row.ratio.anchor, proximal_T)
    assert anchor_T is not None, "the ratio is anchored at the reference, and none is known"
    return Tokens(
        logprobs=batch.logprobs,
        log_ratio=row.ratio(batch.logprobs - anchor_T, batch.sample),
        log_weight=proximal_T - drawn_T,
        log_drift=(batch.logprobs - drawn_T).detach(),
        advantages=flat_T if batch.advantages is None else batch.advantages,
        sample=batch.sample,
        score=flat_T if batch.score is None else batch.score,
        entropy=flat_T if batch.entropy is None else batch.entropy.detach(),
        guided=flat_T.bool() if batch.demonstration is None else batch.demonstration.bool(),
        selected=flat_T.bool() if batch.selected is None else batch.selected.bool(),
        age=flat_T if batch.age is None else batch.age,
        top_behavior=batch.top_behavior,
        top_logprobs=batch.top_logprobs,
    )


def decide_update(row: Algorithm, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
    """`batch` are all tokens of the update; -> (the same with what the row decides over all of them at once, metrics)."""
    tokens = tokens_of(row, batch.with_fields(logprobs=batch.proximal))
    dtype = tokens.logprobs.dtype
    correction_T = row.correction.weights_of(tokens)
    counts_T: Tensor | None = None
    if row.correction.denominator != "all":
        counts_T = row.correction.counts(tokens.log_weight, tokens.sample, correction_T).to(correction_T.dtype)
    decided = batch.with_fields(
        correction=correction_T,
        counts=counts_T,
        selected=row.surrogate.select(tokens).to(dtype) if row.surrogate.selects_tokens else None,
        entropy_mask=row.entropy.select(tokens).to(dtype) if row.entropy.selects_tokens else None,
    )
    return decided, row.correction.measures(tokens.log_weight, tokens.sample)


def explain_objective(row: Algorithm) -> str:
    """The effective formula in plain text: loss, what its letters stand for, gradient at ratio 1, knobs."""
    idle = {path for path in row.idle if "." not in path} | {
        name for name in ("kl", "entropy", "distill") if not getattr(row, name).coef
    }
    idle |= set() if row.reading is None else {"distill"}
    taught = row.distill.coef if row.reading is None and not row.distill.charged else 0.0
    shown = {family: part for family, part in row.parts.items() if family not in idle}
    penalty = f" + {row.kl.coef:g}·k" if row.kl.in_loss else ""
    penalty += f" + {taught:g}·d" if taught else ""
    penalty += "".join(f" + {term.coef:g}·{term.name}" for term in row.terms)
    bonus = f" - {row.entropy.coef:g}·H" if row.entropy.coef else ""
    slope = f" + {row.kl.coef:g}·({row.kl.slope})" if row.kl.in_loss and not row.kl.push else ""
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
    push = f" + c·{row.surrogate.push}" if row.surrogate.push else ""
    push += f" + {row.kl.coef:g}·{row.kl.push}" if row.kl.in_loss and row.kl.push else ""
    push += f" - {row.entropy.coef:g}·∇H" if row.entropy.coef else ""
    push += "".join(f" + {term.coef:g}·∇{term.name}" for term in row.terms)
    push += f" + {taught:g}·∇d" if taught else ""
    kept = row.correction.denominator != "all"
    lines = [
        f"{row.name}  ({row.paper})",
        f"loss      sum over the trainable tokens of w·(c·l{penalty}{bonus})",
        *(f"  {SYMBOLS[family]} = {part}" for family, part in shown.items()),
        *(f"  {term.name} = {term}" for term in row.terms),
        *cost,
        f"  w counts {'what the correction keeps of ' if kept else ''}the whole batch before the first forward pass: "
        "micro-batches and ranks cannot change it",
        f"gradient  at r = 1: sum of w·((c·({row.surrogate.slope}){slope})·∇logp{push})",
        *critic,
        *([] if row.reading is None else [f"reading   beside it, not weighed by w: {row.reading[1]:g}·{row.distill}"]),
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
    """One line for every field that can change the loss, with its meaning."""
    for family, part in row.parts.items():
        meanings = field_meanings(type(part))
        for knob in (f.name for f in fields(part)):
            if family not in row.idle and f"{family}.{knob}" not in row.idle:
                yield f"knob      {family}.{knob} = {getattr(part, knob)}    {meanings.get(knob, '')}"


def field_meanings(of: type) -> dict[str, str]:
    """What a docstring says of each field, in one line.  `name    text`, further lines below the text."""
    meanings, last = dict[str, str](), ""
    for line in cleandoc(of.__doc__ or "").splitlines():
        name, _, text = line.partition("    ")
        if not name and last:
            meanings[last] += " " + text.strip()
        else:
            last = name if text and name.isidentifier() else ""
            if last:
                meanings[last] = text.strip()
    return meanings
