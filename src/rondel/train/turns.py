"""The turns of an episode: what the policy wrote between two observations, and what it saw before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor


def turns_of(
    trainable: Sequence[np.ndarray], keys: Sequence[np.ndarray], sides: Sequence[Hashable]
) -> dict[str, Tensor]:
    """`turn_T` and `state_T` of ScoredSamples, of samples with these trainable positions, whole streams, and with whom
    each is compared.

    A turn ends where the next trainable token does not follow at once. Its state is the tokens between the turn before
    and itself: for the first turn the prompt, for others what came back. Equal tokens are one state among the samples
    of one side, as long as the same pictures stand in them.
    """
    turns, states = [], []
    seen: dict[tuple[Hashable, bytes], int] = {}
    number = 0
    for at, stream, side in zip(trainable, keys, sides, strict=True):
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        lengths = np.diff(first, append=len(at))
        for start, length in zip(first.tolist(), lengths.tolist()):
            begin = int(at[start - 1]) + 1 if start else 0
            shown = stream[begin : int(at[start])].tobytes()
            state = seen.setdefault((side, shown), len(seen))
            turns.append(np.full(length, number, np.int64))
            states.append(np.full(length, state, np.int64))
            number += 1
    if not turns:
        return {}
    return {name: torch.from_numpy(np.concatenate(of)) for name, of in (("turn_T", turns), ("state_T", states))}
