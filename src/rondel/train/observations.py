"""What an episode's policy only read after it began to write: the answers of tools and environments, as tokens to
learn.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rondel.algos.tokens import TokenBatch
from rondel.train.pack import TrainBatch, TrainSample


def observed_batch(batch: TrainBatch) -> TrainBatch:
    """The same sequences, in which the tokens that were read take the place of those that were written; without any,
    none.
    """
    return TrainBatch([other for sample in batch.samples if (other := _observed(sample)) is not None])


def _observed(sample: TrainSample) -> TrainSample | None:
    if not len(sample.trainable):
        return None
    pictures = [np.arange(place.start, place.end) for place in sample.media]
    after = np.arange(sample.trainable[0], len(sample.tokens))
    read = np.setdiff1d(after, np.concatenate([sample.trainable, *pictures])).astype(np.int32)
    if not len(read):
        return None
    known = TokenBatch(torch.zeros(1, dtype=torch.int64).expand(len(read)))
    return replace(sample, trainable=read, known=known, support=None, earned=None, hidden={})
