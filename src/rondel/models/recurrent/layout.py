"""Where the state of a recurrent layer comes from and where it goes, for packed training and for serving.

A mixer gives its per-token inputs [T, ...] and its rule, `rule(state, inputs) -> (outputs, state after them)`:

    SegmentStates   training   a segment starts from the final state of its parent, so a prompt that G answers share
                               is computed once, forward and backward: the gradients of all children meet in that state
    SlotStates      serving    a run of new tokens starts from the state in its sequence's slot, and writes it back

    level 0   | prompt ──────> S |          | prompt' ──> S' |            one batch for each level of the tree
    level 1   S | c1 ... S | c2 .. S | c3 ......   S' | c1 ... S' | c2     and for segments of similar length

T tokens · B rows of one batch · L the longest of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rondel.core.row_split import RowSegment


ALIKE = 0.5  # of the longest of a batch: shorter runs get a batch of their own


@dataclass(frozen=True, slots=True)
class OneSegment:
    """A sample by itself, as a check at load computes it."""

    start: int
    length: int
    parent: int | None = None


class StateRule(Protocol):
    """A recurrence. All states begin as zeros, and inputs of zeros (padding) leave a state as it is."""

    @property
    def name(self) -> str:
        """What tells the states of one layer apart."""

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    @property
    def state_dtype(self) -> torch.dtype: ...

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """State [B, ...] and inputs [B, L, ...] -> outputs [B, L, ...] and the state after each row's last real token.

        `lengths` [B]: how many tokens of each row are real; None if all are.
        """


class RecurrentLayout(Protocol):
    def scan(self, layer: int, rule: StateRule, *inputs: Tensor) -> Tensor:
        """Inputs [T, ...] of a layer's tokens -> outputs [T, ...]."""


class StatePools(Protocol):
    """States of all sequences of an engine."""

    def state_pool(self, layer: int, rule: StateRule, device: torch.device) -> Tensor:
        """The pool [slots, ...] of a layer's states."""


class TokenGrid:
    """Runs of packed tokens (start, length) as rows of one padded batch [B, L]."""

    def __init__(self, runs: Sequence[tuple[int, int]], total: int, device: torch.device | str) -> None:
        start, length = (torch.tensor(side)[:, None] for side in zip(*runs, strict=True))
        own = torch.arange(int(length.max()))
        real = own < length
        places = torch.where(real, start + own, total)  # the row behind all tokens is zero
        self.rows, self.longest = places.shape
        self.lengths = None if bool(real.all()) else length[:, 0].to(device)
        self.real, self.taken = real.flatten().nonzero()[:, 0], places[real]  # on the host
        flat = places.flatten()
        self._first = int(flat[0]) if torch.equal(flat, torch.arange(len(flat)) + flat[0]) else None
        self._places = flat.to(device)

    def gather(self, x: Tensor) -> Tensor:
        """[T+1, ...] -> [B, L, ...]; tokens that lie one behind the other are not copied."""
        if self._first is not None:
            rows = x[self._first : self._first + self.rows * self.longest]
        else:
            rows = x.index_select(0, self._places)
        return rows.view(self.rows, self.longest, *x.shape[1:])


class TokenGrids:
    """All grids of one pass, which together hold every token once."""

    def __init__(self, batches: Sequence[Sequence[tuple[int, int]]], total: int, device: torch.device | str) -> None:
        self.grids = [TokenGrid(runs, total, device) for runs in batches]
        order, at = torch.empty(total, dtype=torch.int64), 0
        for grid in self.grids:
            order[grid.taken] = grid.real + at
            at += grid.rows * grid.longest
        in_order = at == total and torch.equal(order, torch.arange(total))
        self._order = None if in_order else order.to(device)
        self._padded = any(grid.lengths is not None for grid in self.grids)

    def pad(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """[T, ...] -> [T+1, ...] with a row of zeros behind, where a grid needs one."""
        if not self._padded:
            return [x.contiguous() for x in inputs]
        return [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs]

    def collect(self, outputs: Sequence[Tensor]) -> Tensor:
        """[B, L, ...] of each grid -> [T, ...]."""
        rows = torch.cat([out.flatten(0, 1) for out in outputs])
        return rows if self._order is None else rows.index_select(0, self._order)


class SegmentStates:
    """States of a packed row: every segment continues its parent, nothing passes between trees."""

    def __init__(self, segments: Sequence[RowSegment], device: torch.device | str) -> None:
        depth: list[int] = []
        for segment in segments:
            depth.append(0 if segment.parent is None else depth[segment.parent] + 1)
        self._parents = [segment.parent for segment in segments]
        self._needed = set(self._parents)
        self._batches: list[list[int]] = []
        for level in range(max(depth, default=-1) + 1):
            members = [i for i, at in enumerate(depth) if at == level]
            self._batches += similar_lengths([segments[i].length for i in members], members)
        total = sum(segment.length for segment in segments)
        runs = [[(segments[i].start, segments[i].length) for i in batch] for batch in self._batches]
        self._grids = TokenGrids(runs, total, device)

    def scan(self, layer: int, rule: StateRule, *inputs: Tensor) -> Tensor:
        padded = self._grids.pad(inputs)
        final: dict[int, Tensor] = {}
        outputs = []
        for batch, grid in zip(self._batches, self._grids.grids, strict=True):
            above = [final[p] for i in batch if (p := self._parents[i]) is not None]
            state = torch.stack(above) if above else _zeros(len(batch), rule, inputs[0].device)
            out, after = rule(state, [grid.gather(x) for x in padded], grid.lengths)
            outputs.append(out)
            final |= {i: row for i, row in zip(batch, after.unbind(), strict=True) if i in self._needed}
        return self._grids.collect(outputs)


class SlotStates:
    """States of one engine step: each run (start, length, slot, fresh) continues what its slot holds, or nothing."""

    def __init__(
        self, pools: StatePools, runs: Sequence[tuple[int, int, int, bool]], device: torch.device | str
    ) -> None:
        self.pools, self.runs = pools, runs
        batches = similar_lengths([length for _, length, _, _ in runs], list(range(len(runs))))
        total = sum(length for _, length, _, _ in runs)
        self._grids = TokenGrids([[runs[i][:2] for i in batch] for batch in batches], total, device)
        self._slots = [torch.tensor([runs[i][2] for i in batch], device=device) for batch in batches]
        self._fresh = [
            torch.tensor([runs[i][3] for i in batch], device=device) if any(runs[i][3] for i in batch) else None
            for batch in batches
        ]

    def scan(self, layer: int, rule: StateRule, *inputs: Tensor) -> Tensor:
        pool = self.pools.state_pool(layer, rule, inputs[0].device)
        padded = self._grids.pad(inputs)
        outputs = []
        for grid, slots, fresh in zip(self._grids.grids, self._slots, self._fresh, strict=True):
            state = pool.index_select(0, slots)
            if fresh is not None:
                state = state.masked_fill_(fresh.view(-1, *[1] * (state.ndim - 1)), 0)
            out, after = rule(state, [grid.gather(x) for x in padded], grid.lengths)
            pool.index_copy_(0, slots, after.to(pool.dtype))
            outputs.append(out)
        return self._grids.collect(outputs)


def _zeros(rows: int, rule: StateRule, device: torch.device) -> Tensor:
    return torch.zeros(rows, *rule.state_shape, dtype=rule.state_dtype, device=device)


def similar_lengths(lengths: Sequence[int], names: Sequence[int]) -> list[list[int]]:
    """Names of runs in batches of similar length, so that little is padded; runs of one token are always apart."""
    batches: list[list[int]] = []
    longest = 0
    for length, name in sorted(zip(lengths, names, strict=True), key=lambda pair: -pair[0]):
        if batches and (length == longest or (length > 1 and length >= ALIKE * longest)):
            batches[-1].append(name)
        else:
            batches.append([name])
            longest = length
    return batches
