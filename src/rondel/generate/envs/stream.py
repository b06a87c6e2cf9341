"""The endless stream of tasks. Task n is a pure function of (tasks, seed, n), so resume only needs the number n (SPEC L7)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache

from rondel.words.types import Task


@lru_cache(maxsize=8)
def permutation(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of one epoch. Sorted by random(), whose stream Python promises to keep, unlike that of shuffle()."""
    draw = random.Random(f"{seed}/{epoch}").random
    noise = [draw() for _ in range(length)]
    return tuple(sorted(range(length), key=noise.__getitem__))


def nth(tasks: Sequence[Task], seed: int, n: int) -> Task:
    """Task number n: place n mod N of epoch n div N. The cost does not depend on n."""
    epoch, place = divmod(n, len(tasks))
    return tasks[permutation(len(tasks), seed, epoch)[place]]


async def stream(tasks: Sequence[Task], *, seed: int, start: int = 0) -> AsyncIterator[Task]:
    """Tasks start, start + 1, ... for ever."""
    n = start
    while True:
        yield nth(tasks, seed, n)
        n += 1
