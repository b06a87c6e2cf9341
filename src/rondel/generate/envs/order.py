"""In what order tasks are admitted, for ever: `order.task_at(n)` is the task of admission n.

Shuffled    every task once an epoch
Mixed       several sources by their weights, each in an order of its own
A curriculum (curriculum.py) has the same verb, and may remember how tasks went.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from rondel.core.events import Event
from rondel.core.types import Task

PERIOD = 1000  # admissions after which the sources of a mixture repeat, at most


class TaskAdmissions(Protocol):
    """`on_event` reads the journal; `state_dict` and `load` are what it has learned from that, as JSON."""

    def task_at(self, n: int) -> Task: ...
    def on_event(self, event: Event) -> None: ...
    def state_dict(self) -> Any: ...
    def load(self, state: Any) -> None: ...


class PureOrder:
    """Task n is a function of (tasks, seed, n): resuming needs the number n only."""

    def on_event(self, event: Event) -> None: ...

    def state_dict(self) -> Any:
        return None

    def load(self, state: Any) -> None: ...


class ShuffledOrder(PureOrder):
    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks, self.seed = tasks, seed

    def task_at(self, n: int) -> Task:
        """Task number n: place n mod N of epoch n div N. The cost does not depend on n."""
        epoch, place = divmod(n, len(self.tasks))
        return self.tasks[epoch_permutation(len(self.tasks), self.seed, epoch)[place]]


class MixedOrder:
    """After any n admissions, source i has had n·w_i / sum(w) of them, to within one for each other source."""

    def __init__(self, sources: Sequence[tuple[float, TaskAdmissions]]) -> None:
        self.orders = [order for _, order in sources]
        self.turns = _turn_schedule([weight for weight, _ in sources])
        self.before = [[0] * len(sources)]  # how many of each source came before a place of the period
        for turn in self.turns:
            self.before.append([had + (i == turn) for i, had in enumerate(self.before[-1])])

    def task_at(self, n: int) -> Task:
        period, place = divmod(n, len(self.turns))
        source = self.turns[place]
        return self.orders[source].task_at(period * self.before[-1][source] + self.before[place][source])

    def on_event(self, event: Event) -> None:
        for order in self.orders:
            order.on_event(event)

    def state_dict(self) -> Any:
        return [order.state_dict() for order in self.orders]

    def load(self, state: Any) -> None:
        for order, own in zip(self.orders, state, strict=True):
            order.load(own)


def _turn_schedule(weights: list[float]) -> list[int]:
    """Whose turn it is at each place of a period, as even as whole numbers allow:
    always the one that is furthest behind.
    """
    whole = all(weight == int(weight) for weight in weights) and sum(weights) <= PERIOD
    shares = [int(w) for w in weights] if whole else [max(1, round(PERIOD * w / sum(weights))) for w in weights]
    had = [0] * len(shares)
    turns = []
    for place in range(1, sum(shares) + 1):
        turn = max(range(len(shares)), key=lambda i: (place * shares[i] - had[i] * sum(shares), shares[i], -i))
        had[turn] += 1
        turns.append(turn)
    return turns


@lru_cache(maxsize=32)
def epoch_permutation(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of one epoch. Sorted by random(), whose stream Python promises to keep, unlike that of shuffle()."""
    draw = random.Random(f"{seed}/{epoch}").random
    noise = [draw() for _ in range(length)]
    return tuple(sorted(range(length), key=noise.__getitem__))


async def stream_tasks(
    order: TaskAdmissions, *, start: int = 0, room: Callable[[], Awaitable[object]] | None = None
) -> AsyncIterator[Task]:
    """Tasks start, start + 1, ... for ever; each is chosen when there is `room` for it, so
    that a curriculum knows all that came before.
    """
    n = start
    while True:
        if room is not None:
            await room()
        yield order.task_at(n)
        n += 1
