"""Pages of the cache of keys and values, one token each: which are free, and those of running requests: reserved for
what a step computes, shared through the prefix tree, given back.

page 0      scratch: tables are padded with it, nobody reads it
free        handed out in runs of RUN, so that the tokens of a request lie beside each other
cached      owned by the radix tree      private      owned by one request
law 7       free + cached + private = all pages

free ──reserve──> private ──store_prefix──> cached in the tree, locked while somebody runs on it
 ^                   │                         │
 └─────── drop ──────┘ <──────── evict ────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rondel.core.errors import LawError
from rondel.generate.engine.builtin.radix import RadixTree
from rondel.models.cache_pools import LayerPools

if TYPE_CHECKING:
    from collections import Counter

    from rondel.generate.engine.builtin.radix import Root
    from rondel.generate.engine.builtin.request import SequenceState
    from rondel.generate.engine.builtin.states import SequenceStates

CACHED = 0.75  # of a prompt: it is cached for the most part
RUN = 32  # pages


class FreePages:
    """The pages `first` .. `first` + `count` that are free. Requests that decode together take a page each in every
    step. One after the other off a stack, the tokens of one request would lie as far apart as there are requests, in
    the same few sets of a processor's cache: with 64 requests of 300 tokens the layers of a decode step took 1.3
    times as long.
    """

    def __init__(self, first: int, count: int) -> None:
        self._count, self._first, self._is_free = count, first, bytearray(b"\1" * count)
        self._sizes = [min(RUN, count - at) for at in range(0, count, RUN)]  # the last one may be shorter
        self._left = self._sizes[:]  # free ones of each run
        self._is_whole = bytearray(b"\1" * len(self._left))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (self._first + at for at, free in enumerate(self._is_free) if free)

    def take(self, n: int, behind: int | None) -> list[int]:
        """n of them, from the one behind the page `behind` on: to the end of its run, and through runs that are whole."""
        taken, at = list[int](), -1 if behind is None else behind - self._first + 1
        self._count -= n
        while len(taken) < n:
            follows = 0 <= at < len(self._is_free) and self._is_free[at] and (at % RUN or self._is_whole[at // RUN])
            if not follows:
                run = self._is_whole.find(1)
                at = run * RUN if run >= 0 else self._is_free.find(1)
            self._is_free[at] = self._is_whole[at // RUN] = 0
            self._left[at // RUN] -= 1
            taken.append(self._first + at)
            at += 1
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            at = page - self._first
            assert not self._is_free[at], f"page {page} is given back twice"
            self._is_free[at], run = 1, at // RUN
            self._left[run] += 1
            self._is_whole[run] = self._left[run] == self._sizes[run]
            self._count += 1


class PageAllocator:
    """The allocator and the memory behind it."""

    def __init__(self, count: int, *, ranks: int = 1, rank: int = 0) -> None:
        """`ranks` that have a cache of `count` pages each, with numbers of their own: this is that of `rank`. Keys and
        values lie where it is; routes of all are kept with the first one's.
        """
        self.count, self.ranks = count, ranks
        self.routes: np.ndarray | None = None  # [pages, L, K] experts that each cached token went to, and keys it chose
        self.keys, self.values = LayerPools(count + 1), LayerPools(count + 1)
        self.free = FreePages(rank * count + 1, count)

    @property
    def of_ranks(self) -> list[PageAllocator]:
        """This one, the first, and new ones for the ranks beside it."""
        return [self, *(PageAllocator(self.count, ranks=self.ranks, rank=rank) for rank in range(1, self.ranks))]

    @property
    def free_count(self) -> int:
        return len(self.free)

    def allocate_pages(self, n: int, behind: int | None = None) -> list[int]:
        """`behind`: the page of the token before theirs."""
        assert n <= self.free_count, f"{n} pages wanted, {self.free_count} free: the scheduler must make room first"
        return self.free.take(n, behind)

    def free_pages(self, pages: Iterable[int]) -> None:
        self.free.give_back(pages)

    def note_routes(self, slots: Tensor, routes: Tensor) -> None:
        """Beside its keys and values a token keeps its route, so that a prefix that is found in
        the cache has one too.
        """
        if self.routes is None:
            self.routes = np.zeros((self.ranks * self.count + 1, *routes.shape[1:]), np.uint16)
        self.routes[slots.cpu().numpy()] = routes.cpu().numpy()

    def release_memory(self) -> None:
        """Forget every key and value; the pools are empty at the next write."""
        self.keys.clear()
        self.values.clear()


def last_page(live: SequenceState) -> int | None:
    """That of its newest token."""
    return live.pages[-1] if live.pages else None


class SequencePages:
    """The pages of running requests, in the cache of one rank."""

    def __init__(self, pages: PageAllocator, tree: RadixTree, states: SequenceStates | None) -> None:
        """`states`: of a model with recurrent layers."""
        self.pages, self.tree, self.states = pages, tree, states

    @property
    def in_use(self) -> int:
        """Pages that somebody runs on."""
        return self.pages.count - self.pages.free_count - self.tree.cached + self.tree.held

    def make_room(self, n: int) -> bool:
        """Whether n pages are free now: what nobody runs on is evicted for them, and nothing in vain."""
        if self.pages.count - self.in_use < n:
            return False
        if self.pages.free_count < n:
            self.pages.free_pages(self.tree.evict(n - self.pages.free_count))
        return True

    def reserve(self, live: SequenceState, n: int) -> bool:
        if not self.make_room(n):
            return False
        live.pages += self.pages.allocate_pages(n, last_page(live))
        return True

    def reserve_ahead(self, live: SequenceState, n: int) -> int:
        """Pages for guesses: only free ones, nobody is evicted or retracted for a guess. -> how many there are."""
        live.ahead = self.pages.allocate_pages(min(n, self.pages.free_count), last_page(live))
        return len(live.ahead)

    def give_back_ahead(self, live: SequenceState) -> None:
        """The pages of guesses are free again."""
        self.pages.free_pages(live.ahead)
        live.guess, live.ahead = [], []
        live.noted = min(live.noted, live.computed_tokens)  # its line in the page table ends where its tokens do

    def store_prefix(self, live: SequenceState, upto: int) -> None:
        """Give the pages of the first `upto` tokens to the tree, unless they mix versions. With recurrent layers that
        is all it has computed, and its state is kept there.
        """
        if live.root is None or upto <= live.shared:
            return
        node, pages, duplicates = self.tree.insert(live.root, live.cache_keys[:upto], live.pages[:upto])
        self.tree.lock(node)
        self.tree.unlock(live.node)
        live.node, live.pages, live.shared = node, pages + live.pages[upto:], upto
        self.pages.free_pages(duplicates)
        if self.states is not None:
            assert upto == live.computed_tokens, f"a state after {live.computed_tokens} tokens is not one after {upto}"
            self.states.save(live.row, node, is_prompt=upto < live.prompt)
        if duplicates:
            live.noted = 0  # its line in the page table names pages that it gave back

    def drop(self, live: SequenceState) -> None:
        """Its private pages are free; what it shares stays in the tree, for one user less."""
        self.give_back_ahead(live)
        self.pages.free_pages(live.pages[live.shared :])
        self.tree.unlock(live.node)
        live.pages, live.shared, live.node, live.root, live.noted = [], 0, None, None, 0

    def check_sum(self, running: list[SequenceState]) -> None:
        """Law 7: free + cached + private = all pages; a path is locked only for a running request."""
        private = sum(live.computed_tokens - live.shared + len(live.ahead) for live in running)
        if self.pages.free_count + self.tree.cached + private != self.pages.count:
            raise LawError(
                f"pages do not add up: {self.pages.free_count} free + {self.tree.cached} cached + {private} private != "
                f"{self.pages.count}"
            )
        if self.tree.held > sum(live.shared for live in running):
            raise LawError(
                f"{self.tree.held} cached pages are locked for {len(running)} running requests that share fewer"
            )


class EngineCaches(list[SequencePages]):
    """That of an engine, or of each of its ranks where these have requests of their own: the owner of a request is a
    place in this list.
    """

    def __init__(self, pages: PageAllocator, states: SequenceStates | None) -> None:
        kept = [states, *(states and states.another() for _ in range(1, pages.ranks))]
        super().__init__(SequencePages(each, RadixTree(own), own) for each, own in zip(pages.of_ranks, kept))

    @property
    def page_counts(self) -> dict[str, int]:
        """Pages that are free, that are cached, and in total."""
        free, cached, total = (sum(n) for n in zip(*((c.pages.free_count, c.tree.cached, c.pages.count) for c in self)))
        return {"free": free, "cached": cached, "total": total}

    def prefix_lengths(self, root: Root, keys: list[int]) -> list[int]:
        """How many of these tokens each has."""
        return [cache.tree.cached_prefix_length(root, keys) for cache in self]

    def owners_for(self, live: SequenceState, root: Root, run: Counter[int], limit: int) -> list[int]:
        """The owners that a request could get, in the order in which they are asked: where its prompt is cached for the
        most part, as that of siblings is, unless more `run` there than its share of `limit`; then where the pages that
        others run on and the tokens of it that are still to be computed are fewest.
        """
        if len(self) == 1:
            return [0]
        keys = live.cache_keys[: live.computable_tokens - 1]
        cached = self.prefix_lengths(root, keys)

        def order(owner: int) -> tuple[bool, int]:
            stays = cached[owner] >= CACHED * len(keys) and run[owner] < limit / len(self)
            return not stays, self[owner].in_use - cached[owner]

        return sorted(range(len(self)), key=order)

    def free_stale(self, version: int) -> None:
        """What nobody can match under this version, and nobody runs on."""
        for cache in self:
            cache.pages.free_pages(cache.tree.free_stale_nodes(version))

    def evict_all(self) -> None:
        for cache in self:
            cache.pages.free_pages(cache.tree.evict(cache.pages.count))
            if cache.states is not None:
                cache.states.drop_copies()

    def check_sums(self, running: list[SequenceState]) -> None:
        """Law 7, of each."""
        for owner, cache in enumerate(self):
            cache.check_sum([live for live in running if live.owner == owner])
            if cache.states is not None:
                cache.states.check_slots()
