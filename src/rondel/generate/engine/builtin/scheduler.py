"""Which tokens are computed next: prompts first, in chunks, beside everything that decodes; room is made by evicting, then by retracting.

    waiting ──admit──> prefilling ──last chunk──> decoding ──done──> finished
       ^                                             │
       └────────────── retract (tokens kept, pages given back) ┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rondel.generate.engine.builtin.pages import Pages
from rondel.generate.engine.builtin.radix import RadixTree
from rondel.generate.engine.builtin.request import Live
from rondel.words.errors import LawError

AHEAD = 16  # decode tokens for which room is wanted before another prompt is admitted


@dataclass(slots=True)
class Plan:
    """One engine step: chunks are (request, how many of its tokens), decoding requests take one token each."""

    chunks: list[tuple[Live, int]]
    decoding: list[Live]

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.chunks) + len(self.decoding)


class Scheduler:
    def __init__(self, pages: Pages, *, max_running: int, prefill_tokens: int) -> None:
        self.pages, self.tree = pages, RadixTree()
        self.max_running, self.prefill_tokens = max_running, prefill_tokens
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self._rows = list(range(max_running - 1, -1, -1))
        self.prefilled = self.decoded = self.reused = self.retracted = 0  # counters

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- before the step -------------------------------------------------------------------------

    def plan(self, version: int) -> Plan:
        """Reserve pages for one step."""
        decoding = self._room_to_decode()
        budget = self.prefill_tokens
        chunks: list[tuple[Live, int]] = []
        for live in [r for r in self.running if r not in decoding]:  # interrupted in the middle of their prompt
            n = min(budget, live.pending)
            if n and self._reserve(live, n):
                chunks.append((live, n))
                budget -= n
        while self.waiting and budget and len(self.running) < self.max_running:
            live = self._next(version)
            if live is None:
                break
            n = min(budget, live.pending)
            ahead = AHEAD * (len(decoding) + 1) if self.running else 0
            if not self._has_room(n + ahead) or not self._reserve(live, n):
                self._put_back(live)
                break
            live.row = self._rows.pop()
            self.running.append(live)
            chunks.append((live, n))
            budget -= n
        return Plan(chunks, decoding)

    def _next(self, version: int) -> Live | None:
        """The first waiting request that would not compute a prefix which a running one is about to finish (in-batch sharing)."""
        for index, live in enumerate(self.waiting):
            live.root = (version, live.request.adapter, live.request.namespace)
            if any(_shares(live, other) for other in self.running if other.root == live.root and other.shared < other.prompt):
                continue
            del self.waiting[index]
            live.node, live.pages = self.tree.match(live.root, live.tokens[:-1])  # the last token must be fed
            live.pages = list(live.pages)
            live.shared = live.computed
            live.cached = max(live.cached, live.shared)
            self.reused += live.shared
            self.tree.lock(live.node)
            return live
        return None

    def _put_back(self, live: Live) -> None:
        self.tree.unlock(live.node)
        self.reused -= live.shared
        live.node, live.root, live.pages, live.shared = None, None, [], 0
        self.waiting.appendleft(live)

    def _room_to_decode(self) -> list[Live]:
        """One page for each decoding request; retract those with the fewest written tokens (then the longest prompts) until it fits."""
        while True:
            decoding = [r for r in self.running if r.pending == 1 and r.written]
            if self._has_room(len(decoding)):
                for live in decoding:
                    self._reserve(live, 1)
                return decoding
            victim = min(self.running, key=lambda r: (r.written, -r.prompt))
            if len(self.running) == 1:
                raise LawError(f"{self.pages.count} pages cannot hold one request of {len(victim.tokens)} tokens; it should have been refused")
            self.retract(victim)

    def _has_room(self, n: int) -> bool:
        if self.pages.free < n:
            self.pages.give(self.tree.evict(n - self.pages.free))
        return self.pages.free >= n

    def _reserve(self, live: Live, n: int) -> bool:
        if not self._has_room(n):
            return False
        live.pages += self.pages.take(n)
        return True

    # -- after the step --------------------------------------------------------------------------

    def computed(self, plan: Plan) -> None:
        """Keys and values of the plan exist now: prompts become shareable."""
        for live, n in plan.chunks:
            self.prefilled += n
            if live.computed >= live.prompt:
                self._store(live, live.prompt)
        self.decoded += len(plan.decoding)

    def _store(self, live: Live, upto: int) -> None:
        """Give the pages of the first `upto` tokens to the tree, unless they mix versions."""
        if live.root is None or upto <= live.shared:
            return
        node, pages, duplicates = self.tree.insert(live.root, live.tokens[:upto], live.pages[:upto])
        self.tree.lock(node)
        self.tree.unlock(live.node)
        live.node, live.pages, live.shared = node, pages + live.pages[upto:], upto
        self.pages.give(duplicates)
        if duplicates:
            live.noted = 0  # its line in the page table names pages that it gave back

    def release(self, live: Live, version: int) -> None:
        """A finished or aborted request leaves: its context goes to the tree if it is clean, else its pages are free."""
        if live in self.running:
            if live.root is not None and live.root[0] == version:
                self._store(live, live.computed)
            self._drop_pages(live)
            self.running.remove(live)
        elif live in self.waiting:
            self.waiting.remove(live)

    def retract(self, live: Live) -> None:
        """Back to the queue with all its tokens; only its pages are lost, so no output changes."""
        self.retracted += 1
        self._drop_pages(live)
        self.running.remove(live)
        self.waiting.appendleft(live)

    def _drop_pages(self, live: Live) -> None:
        self.pages.give(live.pages[live.shared :])
        self.tree.unlock(live.node)
        self._rows.append(live.row)
        live.pages, live.shared, live.node, live.root, live.row, live.noted = [], 0, None, None, -1, 0

    # -- versions --------------------------------------------------------------------------------

    def new_version(self, version: int) -> None:
        """Running requests keep their keys and values, but those never enter the new tree (law 7)."""
        for live in self.running:
            live.root = None
        self.pages.give(self.tree.forget(version))

    def sweep(self, version: int) -> None:
        """Free what became unlocked of older versions."""
        if len(self.tree.roots) > 1:
            self.pages.give(self.tree.forget(version))

    def drop_cache(self) -> None:
        """All keys and values are gone: running requests go back to the queue, the tree empties."""
        for live in list(reversed(self.running)):
            self.retract(live)
        self.pages.give(self.tree.evict(self.pages.count))

    def check(self) -> None:
        """Law 7: free + cached + private = all pages; at idle nothing is locked."""
        private = sum(live.computed - live.shared for live in self.running)
        if self.pages.free + self.tree.cached + private != self.pages.count:
            raise LawError(f"pages do not add up (law 7): {self.pages.free} free + {self.tree.cached} cached + {private} private != {self.pages.count}")
        if not self.running and self.tree.locked():
            raise LawError("the engine is idle, but cache paths are locked (law 7)")


def _shares(live: Live, other: Live) -> bool:
    """Whether `other`, whose prompt is not in the tree yet, will soon offer most of the prompt of `live`."""
    n = (3 * min(live.prompt, other.prompt)) // 4
    return n >= 8 and live.tokens[:n] == other.tokens[:n]
