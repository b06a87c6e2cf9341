"""Gather and reduce-scatter of rows as steps round a ring, beside which a rank computes (doi:10.1145/3567955.3567959).

    gather   step s of rank i:  multiplies run i - s, while it goes on to rank i + 1 and run i - s - 1 comes from rank i - 1
    reduce   step s of rank i:  computes its part of run i - 1 - s, while the sum of that run so far comes from rank i - 1

n ranks, n - 1 messages each: a rank receives every run but its own (gather), or sums of every run but the one that it
begins (reduce), (n - 1)/n of all rows in the mean, as in the collectives. Runs are those of models/collectives.py. All
ranks send to the next and receive from the one before in the same step, so none waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor

from rondel.models.collectives import RankGroup


def run_slices(lengths: Sequence[int]) -> list[slice]:
    """Where the run of each rank lies among all rows."""
    ends = [*accumulate(lengths)]
    return [slice(end - length, end) for end, length in zip(ends, lengths)]


def gather_ring(x: Tensor, lengths: Sequence[int], ranks: RankGroup, use: Callable[[slice, Tensor], None]) -> Tensor:
    """This rank's run [t, ...] -> all rows [T, ...]. Not differentiable.

    use  called with the place and the rows of each run that is not empty, this rank's first, while the next one comes
    """
    rows, places = x.new_empty(sum(lengths), *x.shape[1:]), run_slices(lengths)
    rows[places[ranks.index]].copy_(x)
    for step in range(ranks.size):
        here, before = places[ranks.index - step], places[ranks.index - step - 1]
        wait = ranks.shift(rows[here], rows[before]) if step < ranks.size - 1 else None
        if here.start < here.stop:
            use(here, rows[here])
        if wait is not None:
            wait()
    return rows


def reduce_ring(lengths: Sequence[int], ranks: RankGroup, part: Callable[[slice], Tensor]) -> Tensor:
    """This rank's run [t, ...] of a sum over the ranks. Not differentiable.

    part  this rank's summand [t_j, ...] of the run at a place, which may be empty; new memory
    """
    places, n, i = run_slices(lengths), ranks.size, ranks.index
    total = part(places[i - 1])
    for step in range(1, n):
        here = places[(i - 1 - step) % n]
        others = total.new_empty(here.stop - here.start, *total.shape[1:])
        wait = ranks.shift(total, others)
        mine = part(here)
        wait()
        total = others.add_(mine)
    return total
