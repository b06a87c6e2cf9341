"""A row and the tokens of a micro-batch -> the loss. The denominators are in the weights, so the loss is a plain sum
(law 3).

Samples are never cut, so what looks at one sample at a time can wait for the micro-batch. What compares samples (a mean
over all weights, the tokens of largest covariance) is decided over the whole update before its first micro-batch, from
the proximal logprobs (`decide_update`): its part of the row needs "proximal_logprobs".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import TokenBatch, Tokens, bounded_exp

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm

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
    if row.gated_distill is not None:
        terms["taught"] = row.gated_distill.term(batch)
        token_T = token_T + counts_T * row.gated_distill.coef * terms["taught"]
    for term in row.terms:
        terms[f"term_{term.name}"] = term(batch)
        token_T = token_T + counts_T * term.coef * terms[f"term_{term.name}"]
    if row.entropy.coef:
        assert batch.entropy is not None, (
            f"the row {row.name} has entropy.coef = {row.entropy.coef}, but no entropy was computed"
        )
        bonus_T = counts_T * (row.entropy.coef * batch.entropy)
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
    """`batch` are all tokens of the update; -> (the same with what the row decides over all
    of them at once, metrics)."""
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
