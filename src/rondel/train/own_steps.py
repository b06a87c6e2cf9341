"""A step in two halves, for loops that are written by hand: gradients that add up, and the move that they make.

    accumulate(trainer, batch, algo) ... accumulate(trainer, batch, algo) ── apply(trainer)

Both run on the device's thread. What a whole step checks is checked here too: finite numbers before the first forward
pass, of each micro-batch and of the gradient; weights fixed before the first micro-batch (law 3).
"""

from __future__ import annotations

import math
from dataclasses import replace

from rondel.algos.aggregate import masked_scale
from rondel.algos.surrogate import TokenRatio
from rondel.algos.table import Algorithm
from rondel.core.errors import TrainError, UserError
from rondel.system.process_memory import release_freed_memory
from rondel.train.observations import observed_batch
from rondel.train.optim import learning_rate
from rondel.train.pack import TrainBatch
from rondel.train.step import LocalTrainer, NotFinite, begin_gradients
from rondel.train.step_metrics import StepMetricSums


def accumulate(
    trainer: LocalTrainer, batch: TrainBatch, algo: Algorithm, *, weight: float, first: bool
) -> dict[str, float]:
    """Add `weight` times the gradient of the loss of a batch. `first`: since the last move. -> metrics of the batch.
    TrainError where a number is not finite: what was added up so far is gone then.
    """
    if "values" in algo.needs:
        raise UserError(
            f"'{algo.name}' needs a critic, which learns in whole steps: use rondel.run, or a row without values"
        )
    trainer.offload.refuse_asleep("step")
    algo = _row_for_answers(algo, batch, trainer.version)
    if first:
        begin_gradients(trainer)
    sums = StepMetricSums()
    try:
        known = trainer._precompute_update(batch, algo, [batch], set())
        own = batch.trainable_samples(algo)
        if own.samples:
            scale = masked_scale(algo.aggregate, own.lengths_N, batch.lengths_N)
            noted = "proximal_logprobs" in algo.needs
            read = observed_batch(own) if algo.reading is not None else TrainBatch([])
            trainer._accumulate_gradients(
                own, algo, sums, weight=weight * scale, proximal_noted=noted, last=not read.samples
            )
            if algo.reading is not None and read.samples:
                row, share = algo.reading
                trainer._accumulate_gradients(read, row, sums, weight=weight * share, proximal_noted=False)
    except NotFinite as fault:
        trainer.weights.zero_grad()
        raise TrainError(f"{fault}. The gradient is gone; nothing has moved") from fault
    return sums.to_metrics(1) | known | {"train/tokens": float(batch.total_tokens)}


def _row_for_answers(algo: Algorithm, batch: TrainBatch, version: int) -> Algorithm:
    """The row, whose ratio starts at who drew the answers where the weights have moved since. A step of a run notes its
    proximal policy before its first move; no such step is known here, so the ratio would be 1 in every move, and nothing
    would be clipped. A row that weighs proximal / behavior reaches back to them already.
    """
    drawn = batch.tokens().versions
    stale = drawn is not None and len(drawn) > 0 and int(drawn.min()) < version
    if not stale or algo.ratio.anchor != "proximal" or algo.uses_behavior_ratio or algo.correction.weighs:
        return algo
    return replace(algo, ratio=replace(algo.ratio, anchor="behavior")) if isinstance(algo.ratio, TokenRatio) else algo


def apply(trainer: LocalTrainer, lr: float | None) -> dict[str, float]:
    """One step of the optimizer with what has been added up, clipped, at `lr` or that of the settings. -> metrics."""
    settings, weights = trainer.settings, trainer.weights
    rate = learning_rate(settings.lr, trainer.step_number, settings) if lr is None else lr
    norm, changed = weights.gradient_norm(), 0.0
    overflowed = weights.overflowed(norm)
    if not overflowed and not math.isfinite(float(norm)):
        weights.zero_grad()
        raise TrainError(f"the norm of the gradient is {float(norm)}: it is gone; nothing has moved")
    release_freed_memory()
    if norm > 0 and not overflowed:
        changed = weights.step(lr=rate, clip=settings.clip, norm=norm)
    weights.zero_grad()
    trainer.moved = changed > 0
    trainer.step_number += 1
    trainer.version += 1
    return {
        "train/grad_norm": float(norm),
        "train/lr": rate,
        "train/weights_changed": changed,
        "train/overflows": float(overflowed),
    }
