"""Passes that some rows of the table need and others do not: policies that are compared over a whole vocabulary, over
the likeliest tokens or over the steps of a flow, and what is kept of a pass beside log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.algos.divergence import Divergence
from rondel.models.routing_tape import RoutingTape
from rondel.train.logprobs import (
    logprob_and_best,
    logprob_entropy_and_kl,
    logprob_entropy_and_top,
)
from rondel.train.pack import MicroBatchShapes, PackedBatch, TrainBatch, micro_batches
from rondel.train.parallel import ALONE, SingleRank
from rondel.train.row_share import RowShare, forward_stage, own_share
from rondel.train.step_policy import steps_of
from rondel.train.teacher_distributions import TeacherDistribution

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.loaded_model import LoadedModel


def forward_with_top(
    loaded: LoadedModel,
    packed: PackedBatch,
    top_ids: Tensor,
    *,
    temperature: float,
    tape: RoutingTape | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob [M], entropy [M]) as `forward` has them, of the distributions that were drawn from, and the
    log-probabilities of `top_ids` [M, K]."""

    def compute_logprobs(own: PackedBatch | RowShare, hidden: Tensor, head: LMHead) -> tuple[Tensor, Tensor, Tensor]:
        ids = top_ids[own.own] if isinstance(own, RowShare) else top_ids
        return logprob_entropy_and_top(hidden, own.target, head, ids, temperature=temperature, kept=own.kept)

    return _forward_own(loaded, packed, tape, compute_logprobs)


def _forward_own(
    loaded: LoadedModel,
    packed: PackedBatch,
    tape: RoutingTape | None,
    compute: Callable[[PackedBatch | RowShare, Tensor, LMHead], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """What `compute` makes of the hidden states before each target: of ranks that share the row each has its own."""
    own = packed if loaded.context is None else own_share(packed, loaded.context)

    def compute_own(head: LMHead) -> tuple[Tensor, Tensor, Tensor]:
        seen = own.encode_images(loaded)
        hidden = loaded.hidden_states(own.tokens, own.positions, own.layout, tape, seen)
        return compute(own, hidden.index_select(0, own.source), head)

    logprobs, entropy, more = loaded.run_with_head(compute_own)
    own.join_flips(tape)
    return own.join_targets(logprobs), own.join_targets(entropy), own.join_targets(more)


def forward_with_reference(loaded: LoadedModel, packed: PackedBatch, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the steps of a flow, and KL(policy || reference) of each [M],
    by the means of the reference [M, D]."""
    steps = steps_of(packed)

    def evaluate(head: Any) -> Any:
        return head.evaluate_with_reference(steps, means)

    found: tuple[Tensor, Tensor, Tensor] = loaded.run_with_head(evaluate)
    return found


def forward_taught(
    loaded: LoadedModel,
    packed: PackedBatch,
    taught: TeacherDistribution,
    apart_by: Divergence,
    *,
    temperature: float,
    tape: RoutingTape | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and how far the whole distribution is from that of the teachers [M]."""

    def compute_logprobs(own: PackedBatch | RowShare, hidden: Tensor, head: LMHead) -> tuple[Tensor, Tensor, Tensor]:
        said = taught.of_targets(own.own) if isinstance(own, RowShare) else taught
        return logprob_entropy_and_kl(hidden, own.target, head, said, temperature=temperature, apart_by=apart_by)

    return _forward_own(loaded, packed, tape, compute_logprobs)


@torch.no_grad()
def store_hidden_states(
    loaded: LoadedModel,
    batch: TrainBatch,
    number: int,
    *,
    budget: int,
    share: bool = True,
    ranks: SingleRank = ALONE,
) -> None:
    """Keep the last hidden states of `loaded` at every trainable token, in host memory: a
    forward pass is not done again for each update. Each rank computes its share, with a teacher that it has whole.
    """
    done: list[int] = []
    where: dict[str, Any] = {"rank": ranks.data_rank, "ranks": ranks.data_size}
    for packed in micro_batches(batch, budget, share=share, device=loaded.device, **where):
        if packed.idle:
            continue
        done += packed.samples
        hidden = loaded.hidden_states(packed.tokens, packed.positions, packed.layout, seen=packed.encode_images(loaded))
        hidden = hidden.index_select(0, packed.source).cpu()
        samples = [batch.samples[i] for i in packed.samples]
        for sample, piece in zip(samples, hidden.split([len(s.trainable) for s in samples])):
            sample.hidden[number] = piece
    ranks.exchange_hidden_states(batch, done, number, loaded.head.weight)


@torch.no_grad()
def annotate_margins(
    loaded: LoadedModel,
    batch: TrainBatch,
    number: int,
    *,
    budget: int,
    temperature: float,
    share: bool = True,
    ranks: SingleRank = ALONE,
    shapes: MicroBatchShapes | None = None,
) -> None:
    """Write as margin `number` of every sample's tokens, which are read behind a hint: log p(best) - log p(token) where
    the token is likelier than when it was drawn, else -1.
    """
    done: list[int] = []
    where: dict[str, Any] = {"rank": ranks.data_rank, "ranks": ranks.data_size, "stages": ranks.stages}
    for packed in micro_batches(batch, budget, share=share, device=loaded.device, shapes=shapes, **where):
        if not loaded.has_head:
            forward_stage(loaded, packed)
            continue
        own: Any = packed if loaded.context is None else own_share(packed, loaded.context)

        def compute_logprobs(head: LMHead, own: Any = own) -> tuple[Tensor, Tensor]:
            hidden = loaded.hidden_states(own.tokens, own.positions, own.layout, None, own.encode_images(loaded))
            return logprob_and_best(hidden.index_select(0, own.source), own.target, head, temperature=temperature)

        told, best = map(own.join_targets, loaded.run_with_head(compute_logprobs))
        if packed.idle:
            continue
        done += packed.samples
        drawn = batch.tokens(packed.samples, loaded.device).behavior
        assert drawn is not None, "the log-probabilities of the behavior are not known"
        batch.write_margins(packed.samples, number, torch.where(told > drawn, best - told, -1.0))
    ranks.exchange_tokens(batch, done, "margins")


@torch.no_grad()
def annotate_step_means(loaded: LoadedModel, batch: TrainBatch, *, budget: int, ranks: SingleRank = ALONE) -> None:
    """Write the means of the steps of a flow under `loaded` as `reference_mean` of every sample's tokens."""
    done: list[int] = []
    for packed in micro_batches(batch, budget, device=loaded.device, rank=ranks.data_rank, ranks=ranks.data_size):
        steps = steps_of(packed)

        def step_means(head: Any, steps: Any = steps) -> Any:
            return head.step_means(steps)

        found = loaded.run_with_head(step_means)
        if not packed.idle:
            done += packed.samples
            batch.write_tokens(packed.samples, reference_mean=found)
    ranks.exchange_tokens(batch, done, "reference_mean")


def annotate_ages(batch: TrainBatch, version: int) -> None:
    """Write how many versions lie between the weights that drew each token and those of `version`, which begin the
    step.
    """
    drawn = batch.tokens().versions
    if drawn is not None:
        batch.write_tokens(age=(version - drawn).clamp(min=0))
