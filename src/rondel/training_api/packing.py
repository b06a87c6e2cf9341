"""Examples of several adapters in one packed pass. Examples of one adapter that begin with the same tokens, as the
answers to one prompt do, are laid out as a tree: what they share is computed once.

    tokens | shared by 0, 1 | rest of 0 .. | rest of 1 .... | 2 of another adapter ... |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rondel.models.adapter_rows import AdapterWeights, Run
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.training_api.backend import Example

SHARED = 16  # tokens from which on a tree is worth its bookkeeping

Owned = tuple[AdapterWeights, Example]


@dataclass(frozen=True, slots=True)
class PackedExamples:
    """tokens, positions [T]; runs: whose they are
    rows, targets [M]     the pairs of a row of the pass and a target whose logprobs are wanted, each once
    owners                whose those are, in turn
    places                of each example, where in [M] its targets are, in their shape
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedLayout
    runs: list[Run]
    rows: Tensor
    targets: Tensor
    owners: list[tuple[AdapterWeights, int]]
    places: list[np.ndarray]


def micro_batches(owned: Sequence[Owned], tokens: int) -> Iterator[list[int]]:
    """Which examples are computed together: neighbours, of at most `tokens` tokens, or one."""
    part: list[int] = []
    size = 0
    for i, (_, example) in enumerate(owned):
        if part and size + len(example.tokens) > tokens:
            yield part
            part, size = [], 0
        part.append(i)
        size += len(example.tokens)
    if part:
        yield part


def pack_examples(owned: Sequence[Owned], device: torch.device | str) -> PackedExamples:
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[PackedSegment] = []
    runs: list[Run] = []
    example_rows: list[np.ndarray] = []
    at = 0

    def lay_out(adapter: AdapterWeights, ids: np.ndarray, first: int, parent: int | None) -> np.ndarray:
        nonlocal at
        rows = np.arange(at, at + len(ids))
        segments.append(PackedSegment(at, len(ids), parent))
        tokens.append(ids)
        positions.append(np.arange(first, first + len(ids)))
        runs.append((adapter, len(ids)))
        at += len(ids)
        return rows

    for members, shared in _families(owned):
        adapter = owned[members[0]][0]
        head, parent = np.empty(0, np.int64), None
        if shared:
            head = lay_out(adapter, np.asarray(owned[members[0]][1].tokens[:shared], np.int64), 0, None)
            parent = len(segments) - 1
        for i in members:
            own = lay_out(adapter, np.asarray(owned[i][1].tokens[shared:], np.int64), shared, parent)
            example_rows.append(np.concatenate([head, own]))
    return PackedExamples(
        torch.from_numpy(np.concatenate(tokens)).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        PackedLayout(segments, device),
        runs,
        *_wanted(owned, example_rows, device),
    )


def _families(owned: Sequence[Owned]) -> Iterator[tuple[list[int], int]]:
    """Neighbours of one adapter and how many tokens they share; 0 for one that shares nothing."""
    i = 0
    while i < len(owned):
        adapter, first = owned[i]
        members, shared = [i], len(first.tokens) - 1
        for j in range(i + 1, len(owned)):
            other = owned[j]
            both = min(shared, _common(first.tokens, other[1].tokens), len(other[1].tokens) - 1)
            if other[0] is not adapter or both < SHARED:
                break
            members.append(j)
            shared = both
        yield members, shared if len(members) > 1 else 0
        i += len(members)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    odd = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(odd[0]) if len(odd) else n


def _wanted(
    owned: Sequence[Owned], example_rows: list[np.ndarray], device: torch.device | str
) -> tuple[Tensor, Tensor, list[tuple[AdapterWeights, int]], list[np.ndarray]]:
    """-> rows, targets, owners, places"""
    pairs, shapes = [], []
    for (_, example), rows in zip(owned, example_rows, strict=True):
        targets = example.targets.reshape(len(rows), -1)
        pairs.append(np.stack([np.repeat(rows, targets.shape[1]), targets.reshape(-1)], 1))
        shapes.append(example.targets.shape)
    each, inverse = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
    ends = np.cumsum([len(pair) for pair in pairs])
    places = [part.reshape(shape) for part, shape in zip(np.split(inverse.reshape(-1), ends[:-1]), shapes, strict=True)]
    owner_of = dict[int, AdapterWeights]()
    for (adapter, _), rows in zip(owned, example_rows, strict=True):
        owner_of.update(dict.fromkeys(rows.tolist(), adapter))
    owners: list[tuple[AdapterWeights, int]] = []
    for row in each[:, 0].tolist():
        if owners and owners[-1][0] is owner_of[row]:
            owners[-1] = owners[-1][0], owners[-1][1] + 1
        else:
            owners.append((owner_of[row], 1))
    wanted = torch.from_numpy(each).to(device)
    return wanted[:, 0].contiguous(), wanted[:, 1].contiguous(), owners, places
