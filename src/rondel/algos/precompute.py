"""What a row decides over the whole update before its first micro-batch, so that no split can change it (law 3).

Samples are never cut, so what looks at one sample at a time can wait for the
micro-batch. What compares samples (a mean over all weights, the tokens of largest covariance)
is decided here, from the proximal logprobs: its
part of the row needs "proximal_logprobs".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import Tokens

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm


@dataclass(frozen=True)
class UpdateMasks:
    """One number for every trainable token of the update, in the order of its samples;
    None where it is left to the micro-batch.
    """

    correction: Tensor | None = None  # [T]
    # [T] 0 or 1: what the correction lets count, in the denominators and for KL and entropy
    counts: Tensor | None = None
    selected: Tensor | None = None  # [T] 0 or 1: by the surrogate
    undecided: Tensor | None = None  # [T] 0 or 1: where the entropy bonus acts


NOTHING = UpdateMasks()


def tokens_of(
    row: Algorithm,
    *,
    logprobs_T: Tensor,
    proximal_T: Tensor,
    sample_T: Tensor,
    entropy_T: Tensor | None = None,
    behavior_T: Tensor | None = None,
    advantages_T: Tensor | None = None,
    score_T: Tensor | None = None,
    guided_T: Tensor | None = None,
    selected_T: Tensor | None = None,
) -> Tokens:
    """The tokens as the parts of a row see them; what is not given is 0."""
    flat_T = torch.zeros_like(proximal_T)
    drawn_T = proximal_T if behavior_T is None else behavior_T
    if guided_T is not None:  # nobody drew a demonstration
        drawn_T = torch.where(guided_T.bool(), proximal_T, drawn_T)
    anchor_T = drawn_T if getattr(row.ratio, "anchor", "proximal") == "behavior" else proximal_T
    return Tokens(
        logprobs=logprobs_T,
        log_ratio=row.ratio(logprobs_T - anchor_T, sample_T),
        log_weight=proximal_T - drawn_T,
        log_drift=(logprobs_T - drawn_T).detach(),
        advantages=flat_T if advantages_T is None else advantages_T,
        sample=sample_T,
        score=flat_T if score_T is None else score_T,
        entropy=flat_T if entropy_T is None else entropy_T.detach(),
        guided=flat_T.bool() if guided_T is None else guided_T.bool(),
        selected=flat_T.bool() if selected_T is None else selected_T.bool(),
    )


def compute_update_masks(row: Algorithm, tokens: Tokens) -> UpdateMasks:
    """`tokens` are all of the update, and their policy is the proximal one."""
    correction_T = row.correction(tokens.log_weight, tokens.sample, tokens.advantages)
    counts_T: Tensor | None = None
    if getattr(row.correction, "denominator", "all") != "all":
        counts_T = row.correction.counts(tokens.log_weight, tokens.sample, correction_T).to(correction_T.dtype)  # type: ignore[attr-defined]
    return UpdateMasks(
        correction=correction_T,
        counts=counts_T,
        selected=row.surrogate.select(tokens).to(tokens.logprobs.dtype) if hasattr(row.surrogate, "select") else None,
        undecided=row.entropy.select(tokens.entropy).to(tokens.logprobs.dtype) if row.entropy.selects_tokens else None,
    )


def counted_tokens(row: Algorithm, lengths_N: Tensor, decided: UpdateMasks) -> Tensor:
    """The tokens of each sample that count in the denominators: all, or those that the
    correction lets count.  [N] -> [N].
    """
    if decided.counts is None:
        return lengths_N
    sample_T = torch.arange(len(lengths_N)).repeat_interleave(lengths_N)
    return torch.zeros_like(lengths_N).index_add(0, sample_T, decided.counts.to(lengths_N.dtype))
