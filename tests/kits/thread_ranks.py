"""Ranks that are threads: each exchanges messages with the others through queues."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

from rondel.models.collectives import RankGroup

WAIT = 20  # seconds for a message: a ring in the wrong order ends with queue.Empty


@dataclass
class ThreadRank:
    """One of `size` ranks, which have a queue from each to each."""

    index: int
    size: int
    links: dict[tuple[int, int], queue.Queue]
    received: int = 0  # numbers

    shift = RankGroup.shift

    def send(self, x, to):
        self.links[self.index, to].put(x.clone())

    def receive(self, out, source):
        return out.copy_(self.links[source, self.index].get(timeout=WAIT))

    def exchange_messages(self, sent, got):
        for x, to in sent:
            if x.numel():
                self.links[self.index, to % self.size].put(x.clone())

        def wait():
            for out, source in got:
                if out.numel():
                    out.copy_(self.links[source % self.size, self.index].get(timeout=WAIT))
                    self.received += out.numel()

        return wait


def on_ranks(n, work):
    """What each of n ranks makes of `work(rank)`, which is called with all of them at once; and the ranks."""
    links = {pair: queue.Queue() for pair in product(range(n), repeat=2)}
    ranks = [ThreadRank(i, n, links) for i in range(n)]
    with ThreadPoolExecutor(n) as pool:
        done = list(pool.map(work, ranks))
    assert all(link.empty() for link in links.values())
    return done, ranks
