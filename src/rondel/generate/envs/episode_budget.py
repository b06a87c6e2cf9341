"""What one episode may use: tokens that the policy writes, replies, seconds, and what remote models cost, spent by all
conversations of the episode together.

What is used up ends the episode: every further reply is empty, with finish_reason "length", and its outcome is
OutOfBudget("turns").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rondel.core.clocks import running_time
from rondel.core.errors import EnvError

ASKS = 64  # empty replies after which an environment is taken for one that never ends


@dataclass
class EpisodeBudget:
    """None is no limit. `EpisodeBudget(turns=8, seconds=60.0)`."""

    tokens: int | None = None
    turns: int | None = None
    seconds: float | None = None
    cost: float | None = None
    clock: Callable[[], float] = running_time  # the time of a stop, by Ctrl-Z say, is nobody's
    used_tokens: int = 0
    used_turns: int = 0
    used_cost: float = 0.0
    over: str = ""  # the first of them that was used up
    _refused: int = 0
    _began: float | None = None

    def begin(self, now: float | None = None) -> float:
        """When the episode's seconds began: now, if nobody asked before."""
        if self._began is None:
            self._began = self.clock() if now is None else now
        return self._began

    def has_room(self) -> bool:
        """Before a reply: whether there may be one. EnvError where it has been asked too often after the end."""
        now = self.clock()
        used = {
            "tokens": (self.used_tokens, self.tokens),
            "turns": (self.used_turns, self.turns),
            "seconds": (now - self.begin(now), self.seconds),
            "cost": (self.used_cost, self.cost),
        }
        self.over = self.over or next((name for name, (n, most) in used.items() if most is not None and n >= most), "")
        if not self.over:
            return True
        self._refused += 1
        if self._refused > ASKS:
            raise EnvError(
                f"the environment has asked for {ASKS} replies after its budget of {self.over} was used up: end the "
                f"episode where a reply has no tokens"
            )
        return False

    def seconds_left(self) -> float | None:
        """What a tool may take now; None is no limit."""
        if self.seconds is None:
            return None
        return self.seconds - (0.0 if self._began is None else self.clock() - self._began)

    def limit_tokens(self, limit: int) -> int:
        """Of one reply."""
        return limit if self.tokens is None else min(limit, self.tokens - self.used_tokens)

    def spend(self, tokens: int, *, cut: bool) -> None:
        """A reply was written; `cut`: it ended for want of tokens."""
        self.used_turns += 1
        self.used_tokens += tokens
        if cut and self.tokens is not None and self.used_tokens >= self.tokens:
            self.over = self.over or "tokens"
