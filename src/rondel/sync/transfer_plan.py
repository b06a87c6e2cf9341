"""From any layout of weights to any other as a list of copies, made once. Pure functions of numbers.

    holders (a trainer's ranks)                    takers (an engine's ranks)
    {shards 2, tp 2} of W [8, 6], cut by columns   {tp 2}, cut by rows
    ┌──────┬──────┐                                ┌─────────────┐
    │ r0   │ r1   │  rows 0-3                      │ e0          │     e0 <- r0, r1       e1 <- r2, r3
    ├──────┼──────┤                        ──►     ├─────────────┤
    │ r2   │ r3   │  rows 4-7                      │ e1          │     each copy is a box of both parts
    └──────┴──────┘                                └─────────────┘

Every number that is wanted is copied once. Of several holders the nearest gives it, of those the one that gives least
so far. So bytes = numbers wanted · bytes of a number, whatever the layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rondel.core.errors import SyncError
from rondel.core.tensor_parts import Block, Place, TensorPart

Distance = Callable[[int, int], int]  # of a holder and a taker


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of one tensor: from `at` on in the part of `source` to `to` on in the part of `target`."""

    name: str
    source: int
    target: int
    at: Place
    to: Place
    size: Place
    bytes: int


class TransferPlanner:
    """Plans tensor after tensor, and remembers what each holder gives.

    distance  of a holder to a taker; the least is the nearest
    """

    def __init__(self, distance: Distance = lambda source, target: 0) -> None:
        self.distance = distance
        self.given: Counter[int] = Counter()  # bytes

    def plan_tensor(
        self, name: str, itemsize: int, held: Sequence[tuple[int, TensorPart]], wanted: Sequence[tuple[int, TensorPart]]
    ) -> list[Copy]:
        """Copies of one tensor. SyncError where nobody has some of it."""
        found = []
        for target, part in wanted:
            left = list(part.blocks)
            while left:
                holders = sorted(held, key=lambda one: (self.distance(one[0], target), self.given[one[0]], one[0]))
                source, piece, box = _first_overlap(holders, left[-1])
                if piece is None or box is None:
                    raise SyncError(f"{name}: nobody has the box {left[-1].size} from {left[-1].start} on")
                at = piece.overlap(box)
                assert at is not None
                self.given[source] += (size := box.numel * itemsize)
                found.append(Copy(name, source, target, at.here, box.here, box.size, size))
                left[-1:] = left[-1].minus(box)
        return found


def _first_overlap(holders: Iterable[tuple[int, TensorPart]], wanted: Block) -> tuple[int, Block | None, Block | None]:
    """The first holder that has some of it: who, its block, and what is common in the taker's part."""
    for source, part in holders:
        for piece in part.blocks:
            if (box := wanted.overlap(piece)) is not None:
                return source, piece, box
    return -1, None, None


def plan_transfer(
    held: Sequence[Mapping[str, TensorPart]],
    wanted: Sequence[Mapping[str, TensorPart]],
    itemsize: Mapping[str, int],
    distance: Distance = lambda source, target: 0,
) -> list[Copy]:
    """All copies, largest tensors first so that loads end even; `held[r]` are the parts of holder r by name."""
    planner, copies = TransferPlanner(distance), []
    names = dict.fromkeys(name for parts in wanted for name in parts)
    sizes = {name: max(parts[name].numel for parts in wanted if name in parts) for name in names}
    for name in sorted(names, key=lambda name: -sizes[name] * itemsize[name]):
        copies += planner.plan_tensor(
            name,
            itemsize[name],
            [(source, parts[name]) for source, parts in enumerate(held) if name in parts],
            [(target, parts[name]) for target, parts in enumerate(wanted) if name in parts],
        )
    return copies


def split_buckets(copies: Iterable[Copy], most: int) -> list[list[Copy]]:
    """The same copies in buckets of at most `most` bytes each; one that is larger is cut, down to single numbers."""
    buckets: list[list[Copy]] = []
    room = 0
    for copy in copies:
        for piece in _split_copy(copy, most):
            if not buckets or piece.bytes > room:
                buckets.append([])
                room = most
            buckets[-1].append(piece)
            room -= piece.bytes
    return buckets


def _split_copy(copy: Copy, most: int) -> Iterable[Copy]:
    if copy.bytes <= most:
        yield copy
        return
    dim = next((d for d, n in enumerate(copy.size) if n > 1), None)
    if dim is None:
        raise SyncError(f"{copy.name}: one number has {copy.bytes} bytes, and a bucket {most}")
    slice_bytes = copy.bytes // copy.size[dim]
    each = max(1, most // slice_bytes)
    for first in range(0, copy.size[dim], each):
        n = min(each, copy.size[dim] - first)
        at, to = (tuple(x + first * (d == dim) for d, x in enumerate(place)) for place in (copy.at, copy.to))
        size = tuple(n if d == dim else x for d, x in enumerate(copy.size))
        yield from _split_copy(replace(copy, at=at, to=to, size=size, bytes=n * slice_bytes), most)
