"""How a packed row lies over the ranks that share it (context parallel):
as much of it as possible whole on one of them.

    row      | prompt P | c1 .. | c2 ... | c3 . |  prompt P' | c ................................ |
    rank 0     p        | c1 .. |          c3 . |  p'        | c ...............                      P, P' and c are
    rank 1       p      |         c2 ... |           p'                         | c ............      shared, in runs

What lies whole on one rank needs no keys and values of others, and nobody needs its. Shared segments lie in runs, one a
rank, and their keys and values are gathered in each layer; with a segment those above it are shared. First nothing is
shared: trees are dealt whole, the largest first, each to the emptiest rank. While the fullest has more than EVEN times
the mean, the top of the largest tree is shared, its branches are trees of their own, and runs fill up who has least. So
short families stay whole, a family too large for a rank shares its prompt, and a long sample is spread over all.

work of a token = cost + the tokens that it sees, itself included
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

PRODUCTS = 6  # times the hidden size: keys whose scores cost as much as a token's own products in a layer
EVEN = 1.05  # times the mean work that the fullest rank may have, for nothing to be gathered


class RowSegment(Protocol):
    """A run of packed tokens that continues its parent, whose place in the list is lower."""

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def parent(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class RowDealing:
    """Of a row over n ranks.

    shared   places of the segments that lie apart over all ranks, in the order of the row; with each its parent
    lengths  [n] tokens of each rank's run of them, one run behind the other; nothing is shared: zeros
    whole    [n] places of the segments that a rank has to itself, in the order of the row
    """

    shared: list[int]
    lengths: list[int]
    whole: list[list[int]]

    @property
    def shared_tokens(self) -> int:
        return sum(self.lengths)

    def rank_places(self, segments: Sequence[RowSegment]) -> list[list[range]]:
        """Of each rank, where in the row its tokens lie: its run, then what it has whole."""
        places: list[list[range]] = [[] for _ in self.whole]
        rank, room = 0, self.lengths[0]
        for s in (segments[i] for i in self.shared):
            at, end = s.start, s.start + s.length
            while at < end:
                if not room:
                    rank += 1
                    room = self.lengths[rank]
                n = min(room, end - at)
                places[rank].append(range(at, at + n))
                at, room = at + n, room - n
        for own, found in zip(self.whole, places, strict=True):
            found += [range(segments[i].start, segments[i].start + segments[i].length) for i in own]
        return places


def work_of(depth: int, tokens: int, cost: int) -> int:
    """Of the first tokens of a segment under so many others."""
    return tokens * (cost + depth) + tokens * (tokens + 1) // 2


def segment_depths(segments: Sequence[RowSegment]) -> list[int]:
    """Tokens above each."""
    above: list[int] = []
    for s in segments:
        above.append(0 if s.parent is None else above[s.parent] + segments[s.parent].length)
    return above


def deal_row(segments: Sequence[RowSegment], ranks: int, cost: int) -> RowDealing:
    """The same on every rank. A row of fewer tokens than ranks is the first one's alone."""
    each = [work_of(depth, s.length, cost) for depth, s in zip(segment_depths(segments), segments)]
    if sum(s.length for s in segments) < ranks:
        return RowDealing([], [0] * ranks, [[*range(len(segments))]] + [[] for _ in range(ranks - 1)])
    below: list[list[int]] = [[] for _ in segments]
    trees = each.copy()
    for i in reversed(range(len(segments))):
        if (parent := segments[i].parent) is not None:
            below[parent].append(i)
            trees[parent] += trees[i]
    mean = sum(each) / ranks
    tops = [(-trees[i], i) for i, s in enumerate(segments) if s.parent is None]
    heapq.heapify(tops)
    shared: list[int] = []
    while tops:
        loads, dealt = _deal_trees(tops, ranks)
        if max(loads) <= EVEN * mean and (shared or min(loads)):
            lengths = _cut_runs(segments, sorted(shared), cost, loads) if shared else [0] * ranks
            if lengths:
                return RowDealing(sorted(shared), lengths, [_members(own, below) for own in dealt])
        _, top = heapq.heappop(tops)
        shared.append(top)
        for i in below[top]:
            heapq.heappush(tops, (-trees[i], i))
    return spread_row(segments, ranks, cost)


def spread_row(segments: Sequence[RowSegment], ranks: int, cost: int) -> RowDealing:
    """All segments are shared, each rank has a run of equal work."""
    every = [*range(len(segments))]
    lengths = _cut_runs(segments, every, cost, [0] * ranks)
    return RowDealing(every, lengths, [[] for _ in range(ranks)]) if lengths else deal_row(segments, ranks, cost)


def _deal_trees(tops: list[tuple[int, int]], ranks: int) -> tuple[list[int], list[list[int]]]:
    """-> the work of each rank, and the tops of its trees."""
    heap = [(0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for work, i in sorted(tops):
        load, rank = heap[0]
        dealt[rank].append(i)
        heapq.heapreplace(heap, (load - work, rank))
    return [load for load, _ in sorted(heap, key=lambda item: item[1])], dealt


def _members(tops: list[int], below: list[list[int]]) -> list[int]:
    """The segments of these trees."""
    found, left = list[int](), list(tops)
    while left:
        found.append(i := left.pop())
        left += below[i]
    return sorted(found)


def _cut_runs(segments: Sequence[RowSegment], shared: list[int], cost: int, loads: list[int]) -> list[int]:
    """Tokens of each rank's run: so many that whoever has least is filled up, and one at least, for all take part when
    they are gathered. Nothing where there are fewer tokens than ranks.
    """
    depths = segment_depths(segments)
    ends = [0, *accumulate(segments[i].length for i in shared)]
    done = [0, *accumulate(work_of(depths[i], segments[i].length, cost) for i in shared)]
    if (tokens := ends[-1]) < (ranks := len(loads)):
        return []
    level = _fill_level(loads, done[-1])
    wanted = list(accumulate(max(0.0, level - load) for load in loads))
    cuts = [0]
    for rank in range(1, ranks):
        goal = done[-1] * wanted[rank - 1] / wanted[-1]
        n = min(bisect_right(done, goal), len(shared)) - 1  # the segment in which it is reached
        own = shared[n]
        inside = bisect_left(range(segments[own].length), goal - done[n], key=lambda t: work_of(depths[own], t, cost))
        cuts.append(min(max(ends[n] + inside, cuts[-1] + 1), tokens - ranks + rank))
    return [b - a for a, b in pairwise([*cuts, tokens])]


def _fill_level(loads: list[int], more: int) -> float:
    """What all have at least when `more` has filled up who had least."""
    rising = sorted(loads)
    for n in range(1, len(rising) + 1):
        level = (more + sum(rising[:n])) / n
        if n == len(rising) or level <= rising[n]:
            return level
    raise AssertionError("a level above all of them is one")
