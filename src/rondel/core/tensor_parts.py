"""Which numbers of a whole tensor somebody has, as boxes: of a shard, of a part that is cut by tp or ep,
of a shard of it.

whole [6, 4]        part [3, 4], rows 1-2 and 5 of the whole
┌─────────┐
│         │         Block(start=(1, 0), size=(2, 4), here=(0, 0))
│█████████│         Block(start=(5, 0), size=(1, 4), here=(2, 0))
│█████████│
│         │
│         │
│█████████│
└─────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

Place = tuple[int, ...]  # one number a dimension


@dataclass(frozen=True, slots=True)
class IndexRun:
    """`size` neighbours along one dimension: from `whole` on in what was cut, from `here` on in the part."""

    here: int
    whole: int
    size: int


@dataclass(frozen=True, slots=True)
class Block:
    """A box of numbers: where it begins in the whole tensor, how large it is, and where it begins in the part."""

    start: Place
    size: Place
    here: Place

    @property
    def numel(self) -> int:
        return prod(self.size)

    def overlap(self, other: Block) -> Block | None:
        """What both have of the whole, as it lies in this one's part."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size))
        if any(a >= b for a, b in zip(start, stop)):
            return None
        size = tuple(b - a for a, b in zip(start, stop))
        return Block(start, size, tuple(h + a - b for h, a, b in zip(self.here, start, self.start)))

    def minus(self, other: Block) -> Iterator[Block]:
        """The rest of this one without `other`, which lies in it, as disjoint boxes."""
        start, size, here = list(self.start), list(self.size), list(self.here)
        for d, (first, n) in enumerate(zip(other.start, other.size)):
            below, above = first - start[d], start[d] + size[d] - first - n
            for skip, length in ((0, below), (below + n, above)):
                if length:
                    shifted = [x + skip * (i == d) for i, x in enumerate(start)]
                    there = [x + skip * (i == d) for i, x in enumerate(here)]
                    yield Block(tuple(shifted), tuple([*size[:d], length, *size[d + 1 :]]), tuple(there))
            start[d], size[d], here[d] = first, n, here[d] + below

    def without(self, other: Block) -> list[Block]:
        """What `other` does not have of it."""
        common = self.overlap(other)
        return [self] if common is None else list(self.minus(common))


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What one rank has of a tensor: the shape of its part, and the blocks of the whole in it."""

    shape: Place
    blocks: tuple[Block, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> TensorPart:
        shape = tuple(shape)
        zero = (0,) * len(shape)
        return cls(shape, (Block(zero, shape, zero),) if prod(shape) else ())

    @property
    def numel(self) -> int:
        return sum(block.numel for block in self.blocks)

    def cut(self, dim: int, length: int, runs: Sequence[IndexRun]) -> TensorPart:
        """The part of this part that has these runs of dimension `dim`, `length` long in all."""
        found = []
        for run in runs:
            for block in self.blocks:
                first = max(run.whole, block.here[dim])
                stop = min(run.whole + run.size, block.here[dim] + block.size[dim])
                if first >= stop:
                    continue
                found.append(
                    Block(
                        _replaced(block.start, dim, block.start[dim] + first - block.here[dim]),
                        _replaced(block.size, dim, stop - first),
                        _replaced(block.here, dim, run.here + first - run.whole),
                    )
                )
        return TensorPart(_replaced(self.shape, dim, length), tuple(found))

    def shard(self, index: int, count: int) -> TensorPart:
        """Rows of one of `count` ranks, as FSDP2 and `torch.chunk` deal them: as many each, the last fewer or none."""
        if not self.shape:
            return self if index == 0 else TensorPart((0,), ())
        each = -(-self.shape[0] // count) if self.shape[0] else 0
        first = min(index * each, self.shape[0])
        size = min(each, self.shape[0] - first)
        return self.cut(0, size, [IndexRun(0, first, size)] if size else [])


def _replaced(place: Place, dim: int, value: int) -> Place:
    return tuple([*place[:dim], value, *place[dim + 1 :]])
