"""One request inside the engine: what it has, what it wrote, which pages hold its context."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rondel.generate.engine.builtin.radix import Node, Root
from rondel.words.types import Completion, FinishReason, Request


@dataclass(slots=True, eq=False)
class Live:
    """
    tokens    prompt ............ written ......
    pages     |<- shared: tree ->|<- private ->|      len(pages) = computed: tokens whose keys and values exist
    """

    request: Request
    finish: Callable[[Completion | Exception], None]
    tokens: list[int]
    prompt: int  # len of the given tokens
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: Node | None = None
    root: Root | None = None  # the namespace its pages were computed under; None once they mix versions
    row: int = -1  # its line in the page table while it runs
    noted: int = 0  # how many of its pages stand in that line
    routes: np.ndarray | None = None  # [n,L,K] of its first n tokens: what was recorded first stays, also when pages are lost
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    first: float = 0.0

    @property
    def computed(self) -> int:
        return len(self.pages)

    @property
    def leads(self) -> bool:
        """Whether it is computing more of its prompt than the last token, which every request feeds itself: siblings wait for that."""
        return self.prompt - self.shared > 1

    @property
    def pending(self) -> int:
        """Tokens whose keys and values do not exist yet; a decoding request has one, the token drawn last."""
        return len(self.tokens) - len(self.pages)

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def drawn(self) -> int:
        """The counter of its next token's noise: tokens that this sample drew before, continued ones included."""
        return self.request.continuation + self.written

    def keep_routes(self, pool: np.ndarray | None) -> None:
        """Copy the routes of its tokens out of the pages, before they go."""
        if pool is not None:
            known = 0 if self.routes is None else len(self.routes)
            fresh = pool[self.pages[known:]]
            self.routes = fresh if self.routes is None else np.concatenate([self.routes, fresh])

    def done(self, stop_ids: frozenset[int]) -> FinishReason | None:
        sampling = self.request.sampling
        last = self.tokens[-1]
        ends = last in sampling.stop or (last in stop_ids and not sampling.ignore_eos)
        if ends and self.written >= sampling.min_tokens:
            return "stop"
        return "length" if self.written >= sampling.max_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        now = time.perf_counter()
        return Completion(
            tokens=self.tokens[self.prompt :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            timings={"queue": (self.first or now) - self.arrived, "total": now - self.arrived},
        )
