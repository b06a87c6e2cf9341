"""Whose keys travel how far, where those of a shared row go round a ring of its ranks (models/ring_attention.py).

    rank 0  | prompt ....... |          its block goes on to ranks 1, 2 and 3, whose tokens see it
    rank 2  | ...... c1 .... |          to rank 3 alone
    rank 3  | .. c1 |                   nowhere: nobody else sees its tokens

A block is what one rank has of the shared run. It stops at the last rank with a query that sees one of its tokens:
causally those behind it, in a sliding window only the nearest, and all ranks where their own segments continue it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rondel.core.row_split import RowDealing, RowSegment

Reach = tuple[int | None, int | None]  # window and chunk of a ScoreRule


@dataclass(frozen=True, slots=True)
class RingPiece:
    """Tokens of one segment that lie together on one rank.

    start   where they begin among the rank's rows: its run, then what it has whole
    depth   tokens above the first one
    parent  place of the piece that it continues
    """

    rank: int
    start: int
    length: int
    depth: int
    parent: int | None

    def lowest_seen(self, reach: Reach, query: int = 0) -> int:
        """The lowest position that this query of the piece, and so any later one, may see."""
        (window, chunk), at = reach, self.depth + query
        lowest = 0 if window is None else max(0, at - window + 1)
        return lowest if chunk is None else max(lowest, at - at % chunk)


def ring_pieces(segments: Sequence[RowSegment], dealing: RowDealing) -> list[RingPiece]:
    """Of all ranks; a parent lies before its pieces."""
    pieces: list[RingPiece] = []
    last: dict[int, int] = {}  # of a segment: its last piece
    ends = [*accumulate(dealing.lengths)]

    def add_piece(rank: int, start: int, length: int, parent: int | None) -> None:
        depth = 0 if parent is None else pieces[parent].depth + pieces[parent].length
        pieces.append(RingPiece(rank, start, length, depth, parent))

    at = rank = 0
    for i in dealing.shared:
        parent, left = segments[i].parent, segments[i].length
        above = None if parent is None else last[parent]
        while left:
            while ends[rank] == at:
                rank += 1
            n = min(left, ends[rank] - at)
            add_piece(rank, at - (ends[rank] - dealing.lengths[rank]), n, above)
            above, at, left = len(pieces) - 1, at + n, left - n
        last[i] = len(pieces) - 1
    for rank, own in enumerate(dealing.whole):
        start = dealing.lengths[rank]
        for i in own:
            parent = segments[i].parent
            add_piece(rank, start, segments[i].length, None if parent is None else last[parent])
            last[i], start = len(pieces) - 1, start + segments[i].length
    return pieces


def seen_pieces(pieces: Sequence[RingPiece], i: int, reach: Reach) -> Iterator[int]:
    """Those above a piece with tokens that its queries see, from the nearest up."""
    lowest, up = pieces[i].lowest_seen(reach), pieces[i].parent
    while up is not None and pieces[up].depth + pieces[up].length > lowest:
        yield up
        up = pieces[up].parent


def ring_hops(pieces: Sequence[RingPiece], ranks: int, reach: Reach = (None, None)) -> list[int]:
    """How far the block of each rank travels; 0: nobody else sees it."""
    hops = [0] * ranks
    for i, piece in enumerate(pieces):
        for up in seen_pieces(pieces, i, reach):
            source = pieces[up].rank
            hops[source] = max(hops[source], (piece.rank - source) % ranks)
    return hops


def ring_tokens(segments: Sequence[RowSegment], dealing: RowDealing, reach: Reach = (None, None)) -> int:
    """Tokens whose keys and values arrive somewhere in one round, summed over the ranks. Gathered, it would be n - 1
    times those that are shared.
    """
    hops = ring_hops(ring_pieces(segments, dealing), len(dealing.lengths), reach)
    return sum(n * length for n, length in zip(hops, dealing.lengths))
