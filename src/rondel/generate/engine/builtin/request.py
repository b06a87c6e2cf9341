"""One request inside the engine: what it has, what it wrote, which pages hold its context;
and what a step computes and reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rondel.core.types import IDS, NUMBERS, Completion, FinishReason, Request, Stint, TokenColumn
from rondel.generate.engine.builtin.radix import RadixNode, Root

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.channels import TokenChannels
    from rondel.generate.engine.builtin.grammar import GrammarConstraint
    from rondel.generate.engine.builtin.ngrams import NgramIndex
    from rondel.generate.engine.builtin.text import IncrementalDetokenizer
    from rondel.generate.engine.builtin.vision_encoder import RequestImages

# (token, logprob, version, the likeliest if they are wanted)
Heard = Callable[[int, float, int, list[tuple[int, float]] | None], None]


@dataclass(slots=True, eq=False)
class SequenceState:
    """
    tokens    prompt ............ written ...... | guess ..
    pages     |<- shared: tree ->|<- private ->| | ahead ..|      len(pages) = computed: tokens whose keys and values exist

    Guesses and their pages live for one step: what the model would have drawn becomes
    tokens and pages, the rest is given back. A step begun ahead has a page there, too,
    for a token that is not yet known.
    """

    request: Request
    finish: Callable[[Completion | Exception], None]
    tokens: list[int]
    prompt: int  # len of the given tokens
    pages: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    shared: int = 0
    node: RadixNode | None = None
    owner: int = 0  # the rank whose cache holds it, since it ran last
    root: Root | None = None  # the namespace its pages were computed under; None once they mix versions
    row: int = -1  # its line in the page table while it runs
    noted: int = 0  # how many of its pages stand in that line
    # [n,L,K] of its first n tokens: what was recorded first stays, also when pages are lost
    routes: np.ndarray | None = None
    logprobs: TokenColumn = field(default_factory=partial(TokenColumn, NUMBERS))
    versions: TokenColumn = field(default_factory=partial(TokenColumn, IDS))
    cached: int = 0
    overtaken: int = 0  # requests that came later and were admitted before it
    ends: frozenset[int] = frozenset()  # tokens that end it
    reader: IncrementalDetokenizer | None = None  # looks for its stop strings
    said: str | None = None  # its text up to the stop string that ended it
    constraint: GrammarConstraint | None = None
    channels: TokenChannels | None = None
    grams: NgramIndex | None = None  # where its runs of tokens occurred before, for guesses
    mark: int = 0  # what it answers, for the token log; 0: its tokens are not logged
    logged: int = 0  # tokens whose routes stand in that log
    fault: Exception | None = None  # why its newest token is worth nothing
    heard: Heard | None = None
    stints: list[Stint] = field(default_factory=list)
    gaze: RequestImages | None = None  # of what it sees
    adapter: str = ""  # by which the prefix cache knows its adapter
    line: int = 0  # which of the request's lines it makes for
    arrived: float = field(default_factory=time.perf_counter)
    first: float = 0.0

    @property
    def computed_tokens(self) -> int:
        return len(self.pages)

    @property
    def cache_keys(self) -> list[int]:
        """What its tokens are known by in the prefix cache."""
        return self.tokens if self.gaze is None else self.gaze.keys + self.tokens[self.prompt :]

    def cache_root(self, version: int) -> Root:
        """Under which its tokens are cached."""
        return version, self.adapter, self.request.namespace

    def chunk_size(self, first: int, n: int) -> int:
        """How many tokens a chunk of n from `first` takes, so that it cuts no image that must be computed whole."""
        return n if self.gaze is None or not n else self.gaze.chunk_size(first, n)

    @property
    def leads_prefill(self) -> bool:
        """Whether it is computing more of its prompt than the last token, which every request
        feeds itself: siblings wait for that.
        """
        return self.prompt - self.shared > 1

    @property
    def pending_tokens(self) -> int:
        """Tokens whose keys and values do not exist yet; a decoding request has one, the token drawn last."""
        return len(self.tokens) - len(self.pages)

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def draws_plainly(self) -> bool:
        """Whether its next tokens depend on nothing but logits, temperature and truncation,
        and only they are wanted."""
        s = self.request.sampling
        shaped = s.has_penalties or bool(s.logit_bias) or s.grammar is not None or self.written < s.min_tokens
        return not shaped and self.channels is None

    def stands_still(self, version: int) -> bool:
        """Whether it computes nothing now: its pictures are not encoded yet; or nothing under these weights, because it
        did not when its run was recorded.
        """
        if self.gaze is not None and self.gaze.lacks_features(
            self.computed_tokens, urgent=self.row >= 0 or self.written > 0
        ):
            return True
        if (lines := self.request.lines) is None:
            return False
        if self.line == len(lines):
            return True
        at, computed, written = lines[self.line]
        return at != version or (self.computed_tokens, self.written) == (computed, written)

    @property
    def computable_tokens(self) -> int:
        """How many of its tokens may be computed now: all, or in a replayed run as many as in the recorded one."""
        if self.request.lines is None:
            return len(self.tokens)
        _, computed, written = self.request.lines[self.line]
        return computed if written == self.written else len(self.tokens)

    def append_version_span(self, version: int) -> None:
        """Note where it stands: the weights change, its cache is lost, or it ends."""
        self.stints.append((version, self.computed_tokens, self.written))

    @property
    def noise_counter(self) -> int:
        """The counter of its next token's noise: tokens that this sample drew before, continued ones included."""
        return self.request.continuation + self.written

    def append_token(self, token: int, logprob: float, version: int) -> None:
        """The next drawn token. Behind another one of the same step it says that the guess
        before it was right: its page stays.
        """
        if self.pending_tokens:
            self.pages.append(self.ahead.pop(0))
        self.restore_token(token, logprob, version)

    def restore_token(self, token: int, logprob: float, version: int) -> None:
        """A token that it drew in an earlier life; its page is computed with the prompt's."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def keep_routes(self, pool: np.ndarray | None) -> None:
        """Copy the routes of its tokens out of the pages, before they go."""
        if pool is not None:
            known = 0 if self.routes is None else len(self.routes)
            fresh = pool[self.pages[known:]]
            self.routes = fresh if self.routes is None else np.concatenate([self.routes, fresh])

    def routes_from(self, first: int, upto: int, pool: np.ndarray) -> np.ndarray:
        """Of its computed tokens [first, upto), guesses included: what was recorded first,
        then what its pages say.  [n,L,K].
        """
        known = pool[:0] if self.routes is None else self.routes
        fresh = max(first, len(known))
        pages = self.pages[fresh:upto] if upto <= len(self.pages) else [*self.pages, *self.ahead][fresh:upto]
        return np.concatenate([known[first:upto], pool[pages]])

    def check_finish(self) -> FinishReason | None:
        """Asked once a token. End tokens were forbidden where they must not be drawn; strings
        cannot be, so an early one is passed over.
        """
        sampling = self.request.sampling
        if self.tokens[-1] in self.ends:
            return "stop"
        if self.reader is not None:
            said = self.reader.find_stop(self.tokens[len(self.tokens) - self.noise_counter :])
            if said is not None and self.written > sampling.min_tokens:
                self.said = said
                return "stop"
        return "length" if self.written >= sampling.max_tokens else None

    def to_completion(self, reason: FinishReason) -> Completion:
        now = time.perf_counter()
        return Completion(
            tokens=TokenColumn(IDS, self.tokens[self.prompt :]),
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            stints=self.stints,
            timings={"queue": (self.first or now) - self.arrived, "total": now - self.arrived},
            **(self.channels.token_lists() if self.channels is not None else {}),
        )


@dataclass(slots=True)
class StepPlan:
    """One engine step: chunks are (request, how many of its tokens), decoding requests
    take one token each, and their guesses.
    """

    chunks: list[tuple[SequenceState, int]]
    decoding: list[SequenceState]

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.chunks) + sum(1 + len(live.ahead) for live in self.decoding)


@dataclass(slots=True, eq=False)
class TokenFeed:
    """Tokens [first, first + n) of what a request has and guesses, on their way through a model."""

    live: SequenceState
    first: int
    n: int

    @property
    def position_ids(self) -> np.ndarray:
        """[4, n] positions, in a step in which someone sees a picture."""
        end = self.first + self.n
        return (
            np.broadcast_to(np.arange(self.first, end), (4, self.n))
            if self.live.gaze is None
            else self.live.gaze.position_ids(self.first, end)
        )
