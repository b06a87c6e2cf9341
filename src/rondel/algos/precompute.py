"""What a row decides over the whole update before its first micro-batch, so that no split can change it (law 3).

Samples are never cut, so what looks at one sample at a time can wait for the
micro-batch. What compares samples (a mean over all weights, the tokens of largest covariance)
is decided here, from the proximal logprobs: its
part of the row needs "proximal_logprobs".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import TokenBatch, Tokens

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm


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


def counted_tokens(lengths_N: Tensor, counts_T: Tensor | None) -> Tensor:
    """The tokens of each sample that count in the denominators: all, or those of `TokenBatch.counts`.  [N] -> [N]."""
    if counts_T is None:
        return lengths_N
    sample_T = torch.arange(len(lengths_N)).repeat_interleave(lengths_N)
    return torch.zeros_like(lengths_N).index_add(0, sample_T, counts_T.to(lengths_N.dtype))
