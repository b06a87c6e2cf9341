"""The turns of an episode: what the policy wrote between two observations, and what it saw before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rondel.train.pack import TrainSample


def turns_of(samples: Sequence[TrainSample]) -> dict[str, Tensor]:
    """`turn_T` and `state_T` of ScoredSamples.

    A turn ends where the next trainable token does not follow at once. Its state is the tokens between the turn before
    and itself: for the first turn the prompt, for others what came back. Equal tokens are one state among the samples of
    one group and agent, as long as the same pictures stand in them.
    """
    turns, states = [], []
    seen: dict[tuple[int, str, bytes], int] = {}
    number = 0
    for sample in samples:
        first = np.flatnonzero(np.diff(sample.trainable, prepend=-2) != 1)
        lengths = np.diff(first, append=len(sample.trainable))
        for start, length in zip(first.tolist(), lengths.tolist()):
            begin = int(sample.trainable[start - 1]) + 1 if start else 0
            shown = sample.keys[begin : int(sample.trainable[start])].tobytes()
            state = seen.setdefault((sample.group, sample.agent, shown), len(seen))
            turns.append(np.full(length, number, np.int64))
            states.append(np.full(length, state, np.int64))
            number += 1
    if not turns:
        return {}
    return {name: torch.from_numpy(np.concatenate(of)) for name, of in (("turn_T", turns), ("state_T", states))}
