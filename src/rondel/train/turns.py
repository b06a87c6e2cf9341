"""The turns of an episode: what the policy wrote between two observations, and what it saw before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor


def turns_of(
    trainable: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    sides: Sequence[Hashable],
    shown: Sequence[np.ndarray | None],
) -> dict[str, Tensor]:
    """`turn_T` and `state_T` of ScoredSamples, of samples with these trainable positions, whole streams, with whom
    each is compared, and [m, O] what a world of arrays showed before each token; None of one that wrote text.

    A turn ends where the next trainable token does not follow at once. Its state is the tokens between the turn before
    and itself: for the first turn the prompt, for others what came back. Equal tokens are one state among the samples
    of one side, as long as the same pictures stand in them. In a world of arrays each token, an action or a chunk of
    them, is a turn, whose state is what the world showed.
    """
    turns, states = [], []
    seen: dict[tuple[Hashable, bytes], int] = {}
    number = 0
    for at, stream, side, seen_T in zip(trainable, keys, sides, shown, strict=True):
        if seen_T is not None:
            rows = seen_T + np.float32(0)  # of -0, which has other bits, 0
            turns.append(number + np.arange(len(at)))
            states.append(np.array([seen.setdefault((side, row.tobytes()), len(seen)) for row in rows], np.int64))
            number += len(at)
            continue
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        lengths = np.diff(first, append=len(at))
        for start, length in zip(first.tolist(), lengths.tolist()):
            begin = int(at[start - 1]) + 1 if start else 0
            read = stream[begin : int(at[start])].tobytes()
            state = seen.setdefault((side, read), len(seen))
            turns.append(np.full(length, number, np.int64))
            states.append(np.full(length, state, np.int64))
            number += 1
    if not turns:
        return {}
    return {name: torch.from_numpy(np.concatenate(of)) for name, of in (("turn_T", turns), ("state_T", states))}
