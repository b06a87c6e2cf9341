"""Which tokens are computed next: prompts first, in chunks, beside everything that decodes;
room is made by evicting, then by retracting.

waiting ──admit──> prefilling ──last chunk──> decoding ──done──> finished
   ^                                             │
   └────────────── retract (tokens kept, pages given back) ┘
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice, takewhile
from math import inf

from rondel.core.errors import LawError
from rondel.generate.engine.builtin.pages import CACHED, EngineCaches, PageAllocator
from rondel.generate.engine.builtin.radix import Root
from rondel.generate.engine.builtin.replay_gate import ReplayGate
from rondel.generate.engine.builtin.request import SequenceState, StepPlan
from rondel.generate.engine.builtin.states import SequenceStates

# waiting requests among which the one with the longest cached prefix goes first; how many may be admitted before one
# that came earlier
LOOKED, OVERTAKEN = 32, 16
AHEAD = 16  # decode tokens for which room is wanted before another prompt is admitted


class Scheduler:
    def __init__(
        self, pages: PageAllocator, *, max_running: int, prefill_tokens: int, states: SequenceStates | None = None
    ) -> None:
        """`states`: of a model with recurrent layers."""
        self.pages, self.states = pages, states
        self.caches = EngineCaches(pages, states)
        self.max_running, self.prefill_tokens = max_running, prefill_tokens
        self.limit = max_running  # of those, how many may run now
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._replay: ReplayGate | None = None  # from the first request of a replayed run on
        self._rows = list(range(max_running - 1, -1, -1))
        self.prefilled = self.decoded = self.reused = self.retracted = 0  # counters

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_begun(self) -> bool:
        """Whether some answer is half written."""
        return bool(self.running) or any(live.written for live in self.waiting)

    # -- the lines of a replayed run ----------------------------------------------------------------

    def begin_replay(self, version: int) -> None:
        """A request with lines has come."""
        if self._replay is None:
            self._replay = ReplayGate(self.running, self.waiting, self.retract_sequence)
        self._replay.follow_lines(version)

    def follow_lines(self, version: int) -> None:
        if self._replay is not None:
            self._replay.follow_lines(version)

    def is_behind(self, version: int) -> bool:
        """Whether anyone has not yet come as far as in the run that is replayed."""
        return self._replay is not None and self._replay.is_behind(version)

    # -- before the step -------------------------------------------------------------------------

    def plan_step(self, version: int, *, fresh: bool = True) -> StepPlan:
        """Reserve pages for one step. `fresh` False admits only requests that have written
        something: the engine is being drained.
        """
        decoding = [live for owner in range(len(self.caches)) for live in self._room_to_decode(owner, version)]
        decode, run = (Counter(live.owner for live in of) for of in (decoding, self.running))
        budget = self.prefill_tokens
        chunks: list[tuple[SequenceState, int]] = []
        # those interrupted in the middle of their prompt; the decoding ones have nothing pending any more
        for live in self.running:
            left = 0 if live.stands_still(version) else self._chunk_end(live, live.computed_tokens)
            left = max(0, left - live.computed_tokens)
            n = live.chunk_size(live.computed_tokens, min(budget, left))
            if n and self.caches[live.owner].reserve(live, n):
                chunks.append((live, n))
                budget = max(0, budget - n)
        leaders = [r for r in self.running if r.leads_prefill and not r.stands_still(version)]
        for live in self._waiting_order(version, budget):
            if not budget or len(self.running) >= self.limit:
                break
            root = live.cache_root(version)
            if not (fresh or live.written) or live.stands_still(version):
                continue
            ahead_of_it = [other for other in leaders if other.root == root]
            cached = {other.owner: 0 for other in ahead_of_it}
            for owner in cached:
                cached[owner] = self.caches[owner].tree.cached_prefix_length(root, live.cache_keys)
            if any(self._will_share_prompt(live, other, cached[other.owner]) for other in ahead_of_it):
                # in-batch sharing: a running request is about to finish the prefix that this one would compute
                continue
            for owner in self.caches.owners_for(live, root, run, self.limit):
                ahead = AHEAD * (decode[owner] + 1) if run[owner] else 0
                if n := self._admit_sequence(live, owner, root, budget, ahead=ahead):
                    break
            else:
                break
            run[live.owner] += 1
            chunks.append((live, n))
            budget = max(0, budget - n)
            if live.leads_prefill:
                leaders.append(live)
        return StepPlan(chunks, decoding)

    def _waiting_order(self, version: int, budget: int) -> list[SequenceState]:
        """Those that wait, the longest cached prefix first (arXiv:2312.07104), equal ones in the order of arrival: what
        is cached is used before it is evicted. Before them those whose prompt is cached for the most part.

        Retracted requests, recorded ones, and one that was overtaken `OVERTAKEN` times are
        overtaken by nobody, so nobody waits for ever.
        """
        if not budget or len(self.running) >= self.limit or len(self.waiting) < 2:
            return list(self.waiting)

        def cached_prefix(live: SequenceState) -> tuple[bool, float]:
            if live.written or live.request.lines is not None or live.overtaken >= OVERTAKEN:
                return True, inf
            keys = live.cache_keys[: live.computable_tokens - 1]
            root = live.cache_root(version)
            n = max(self.caches.prefix_lengths(root, keys))
            return n >= CACHED * len(keys), n

        looked = sorted(islice(self.waiting, LOOKED), key=cached_prefix, reverse=True)
        return [*looked, *islice(self.waiting, LOOKED, None)]

    def _admit_sequence(self, live: SequenceState, owner: int, root: Root, budget: int, *, ahead: int) -> int:
        """Match, lock, reserve, in the cache of one rank. -> how many of its tokens this step computes, 0 if there is
        no room (then nothing has changed).
        """
        cache, reach = self.caches[owner], live.computable_tokens
        node, known = cache.tree.match_reusable(root, live.cache_keys[: reach - 1])  # the last token must be fed
        n = live.chunk_size(len(known), min(budget, self._chunk_end(live, len(known)) - len(known)))
        cache.tree.lock(node)
        if not cache.make_room(n + ahead):
            cache.tree.unlock(node)
            return 0
        for earlier in takewhile(lambda other: other is not live, self.waiting):
            earlier.overtaken += 1
        self.waiting.remove(live)
        self.running.append(live)
        live.root, live.node, live.shared, live.row = root, node, len(known), self._rows.pop()
        live.owner, live.pages = owner, known + cache.pages.allocate_pages(n, known[-1] if known else None)
        if cache.states is not None and known:
            cache.states.restore(node, live.row)
        live.cached = max(live.cached, live.shared)
        self.reused += live.shared
        return n

    def _chunk_end(self, live: SequenceState, computed: int) -> int:
        """Up to where its next chunk may go. A state is kept before the last token of a prompt, where siblings go on,
        so with recurrent layers a chunk ends there.
        """
        reach, prompt = live.computable_tokens, live.prompt - 1
        return prompt if self.states is not None and computed < prompt < reach else reach

    def _will_share_prompt(self, live: SequenceState, other: SequenceState, cached: int) -> bool:
        """Whether `other`, whose prompt is not in the tree yet, will soon offer most of what is left of the prompt of
        `live`, of which `cached` tokens are there: prompts that differ behind a long system prompt are computed side by
        side as soon as that is cached.

        Only who came before may be waited for: later ones could follow each other without end.
        """
        n = cached + (3 * (min(live.prompt, other.prompt) - cached)) // 4
        if self.states is not None:  # it offers all of its prompt or nothing
            n = other.prompt - 1
        return (
            other.arrived <= live.arrived
            and cached + 4 <= n < len(live.tokens)
            and live.cache_keys[:n] == other.cache_keys[:n]
        )

    def _room_to_decode(self, owner: int, version: int) -> list[SequenceState]:
        """One page for each decoding request of a rank; retract those with the fewest written tokens
        (then the longest prompts) until it fits.
        """
        cache = self.caches[owner]
        while True:
            own = [r for r in self.running if r.owner == owner]
            decoding = [r for r in own if r.pending_tokens == 1 and r.written and not r.stands_still(version)]
            if cache.make_room(len(decoding)):
                for live in decoding:
                    cache.reserve(live, 1)
                return decoding
            victim = min(own, key=lambda r: (r.written, -r.prompt))
            if len(own) == 1:
                raise LawError(
                    f"{self.pages.count} pages cannot hold one request of {len(victim.tokens)} tokens; it should have "
                    f"been refused"
                )
            if victim.request.lines is not None and victim.root is None:
                raise LawError(
                    "no room for what the recorded run had room for: its keys and values of earlier weights cannot be "
                    "computed again"
                )
            self.retracted += 1
            self.retract_sequence(victim, version)

    # -- after the step --------------------------------------------------------------------------

    def mark_computed(self, plan: StepPlan) -> None:
        """Keys and values of the plan exist now: prompts become shareable."""
        for live, n in plan.chunks:
            self.prefilled += n
            if self.states is not None:
                if live.computed_tokens == live.prompt - 1:
                    self.caches[live.owner].store_prefix(live, live.computed_tokens)
            elif live.computed_tokens >= live.prompt:
                self.caches[live.owner].store_prefix(live, live.prompt)
        self.decoded += sum(1 + len(live.guess) for live in plan.decoding)

    def roll_back(self, plan: StepPlan) -> None:
        """After delivery: the pages of guesses that did not come true are free again."""
        for live in plan.decoding:
            self.caches[live.owner].give_back_ahead(live)

    def release_sequence(self, live: SequenceState, version: int) -> None:
        """A finished or aborted request leaves: its context goes to the tree if it is clean, else
        its pages are free.
        """
        if live in self.running:
            if live.root is not None and live.root[0] == version:
                self.caches[live.owner].store_prefix(live, live.computed_tokens)
            self._free_row(live)
            self.running.remove(live)
            self.caches.free_stale(version)
        elif live in self.waiting:
            self.waiting.remove(live)

    def retract_sequence(self, live: SequenceState, version: int) -> None:
        """Back to the queue with all its tokens; only its pages are lost, so no output changes."""
        self._free_row(live)
        live.append_version_span(version)
        self.running.remove(live)
        self.waiting.appendleft(live)

    def _free_row(self, live: SequenceState) -> None:
        live.keep_routes(self.pages.routes)
        self.caches[live.owner].drop(live)
        self._rows.append(live.row)
        live.row = -1

    # -- versions --------------------------------------------------------------------------------

    def new_version(self, version: int, before: int) -> None:
        """Running requests keep their keys and values, but those never enter the new tree (law 7)."""
        for live in self.running:
            live.root = None
            live.append_version_span(before)
        self.follow_lines(version)
        self.caches.free_stale(version)

    def drop_cache(self, version: int) -> None:
        """All keys and values are gone: running requests go back to the queue, the tree empties."""
        for live in list(reversed(self.running)):
            self.retract_sequence(live, version)
        self.caches.evict_all()

    def check_invariants(self) -> None:
        """Law 7: every page is free, cached or private; a path is locked only for a running request."""
        self.caches.check_sums(self.running)
