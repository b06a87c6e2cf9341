"""How many requests work together: found while they work, up by steps and down by halves (AIMD).

    tokens/s          ┌────── knee: more together is not faster
                    ╱ │            grew, and it paid      -> a step more
                  ╱   │            grew, and it did not   -> that step back, then rest
                ╱     │            it was slower           -> down, while that is faster
               ╱      │            no room (a request was retracted, one timed out)  -> half
    together ──┴──────┴──────

Only windows in which the limit was felt are looked at: with nobody waiting there is
nothing to learn. What a request draws does not depend on who is decoded beside it, so this changes times and no result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEPS = 16  # from one to the most
PAID = 0.25  # of what a step would bring if twice as many were twice as fast
CLEAR = 0.03  # by so much a rate is another one, and no noise
REST = 8  # windows after a step that did not pay, or a half
WINDOW = 32  # notes of one measurement


@dataclass(slots=True)
class ConcurrencyController:
    """`ConcurrencyController(most=64).limit` requests together; `note` what came of it. 1 <= limit <= most, always."""

    most: int
    limit: int = 0
    rest: int = 0
    slowest: tuple[int, float] = (0, 0.0)  # the fewest that were measured, and their tokens a second
    now: tuple[int, float] = (0, 0.0)  # what was measured last
    _tried: tuple[int, float] = (0, 0.0)  # before the last step
    _down: bool = False  # more together was clearly slower: fewer are tried next
    _notes: int = 0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _told: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.limit = self.limit or max(1, self.most // 4)

    @property
    def step(self) -> int:
        return max(1, self.most // STEPS)

    def record_answer(self, tokens: int, seconds: float, *, felt: bool, pressed: bool = False) -> None:
        """`felt`: somebody waited for a place. `pressed`: there was no room for those who had one."""
        if pressed:
            self.limit, self.rest, self._tried, self._down = max(1, self.limit // 2), REST, (0, 0.0), False
            return self._reset_window()
        if not felt:
            return self._reset_window()
        self._notes += 1
        self._tokens += tokens
        self._seconds += seconds
        if self._notes >= WINDOW and self._seconds > 0:
            self._adjust_limit(self._tokens / self._seconds)
            self._reset_window()

    def _adjust_limit(self, rate: float) -> None:
        self.now = (self.limit, rate)
        if not self.slowest[0] or self.limit <= self.slowest[0]:
            self.slowest = self.now
        (before, was), down = self._tried, self._down
        self._tried, self._down = (0, 0.0), False
        if before > self.limit:  # a step down, which goes on while it is clearly faster
            if rate > was * (1 + CLEAR):
                self._step_down()
            else:
                self.limit, self.rest = before, REST
        elif before and rate < was * (1 + PAID * (self.limit / before - 1)):
            self._down = before > 1 and rate < was * (1 - CLEAR)
            self.limit, self.rest = before, 0 if self._down else REST
        elif down:
            self._step_down()
        elif self.rest:
            self.rest -= 1
        elif self.limit < self.most:
            self._tried = self.now
            self.limit = min(self.most, self.limit + self.step)

    def _step_down(self) -> None:
        if self.limit == 1:
            self.rest = REST
        else:
            self._tried = self.now
            self.limit = max(1, self.limit - self.step)

    def _reset_window(self) -> None:
        self._notes, self._tokens, self._seconds = 0, 0.0, 0.0

    def settled_limit(self) -> tuple[str, float] | None:
        """Where it has come to rest, and the gain over the fewest that were tried; None
        while it looks, or where this was said.
        """
        limit, rate = self.now
        if not self.rest or limit != self.limit or abs(limit - self._told) <= self.step:
            return None
        self._told = limit
        fewest, slow = self.slowest
        gain = rate / slow if slow else 1.0
        return (
            f"engine.concurrency: {limit} of at most {self.most} requests together, {rate:.0f} tokens/s ({gain:.1f}x "
            f"those of {fewest})",
            gain,
        )
