"""Packed rows that several ranks share, made up."""

from __future__ import annotations

from itertools import chain

import numpy as np

from rondel.models.packed_layout import PackedSegment

COST = 64


def row_of(*families) -> list[PackedSegment]:
    """Segments of families (prompt, completion, ...), one behind the other."""
    segments, at = [], 0
    for prompt, *completions in families:
        segments.append(PackedSegment(at, prompt))
        above, at = len(segments) - 1, at + prompt
        for length in completions:
            segments.append(PackedSegment(at, length, above))
            at += length
    return segments


def random_row(seed: int) -> list[PackedSegment]:
    """A forest: segments of skewed lengths under a root, under each other, or by themselves."""
    rng, segments, at = np.random.default_rng(seed), [], 0
    for i in range(int(rng.integers(1, 40))):
        parent = int(rng.integers(i)) if i and rng.random() < 0.7 else None
        segments.append(PackedSegment(at, int(1 + rng.lognormal(2.5, 1.5)), parent))
        at += segments[-1].length
    return segments


def rank_rows(segments, dealing) -> list[np.ndarray]:
    return [np.array([*chain(*runs)], dtype=int) for runs in dealing.rank_places(segments)]
