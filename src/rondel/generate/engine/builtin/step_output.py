"""What a step draws: on the device at once, where the next step can take it up, and on the host when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rondel.generate.engine.builtin.rejection import matching_prefix_length
from rondel.generate.engine.builtin.sampler import read_draws
from rondel.models.device_copies import HostCopy, upload

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.pages import PageAllocator
    from rondel.generate.engine.builtin.request import SequenceState


@dataclass(slots=True, eq=False)
class StepOutput:
    """
    lives   each with 1 + its guesses rows, in the order of the rows
    tokens  [R] int64, on the device
    drawn   [3, R] float64, on its way to the host: tokens, log-probabilities, masses
    routes  slots [T] and experts [T, L, K] of the step's tokens, where they are recorded
    """

    lives: list[SequenceState]
    tokens: Tensor
    drawn: HostCopy
    routes: tuple[HostCopy, HostCopy] | None

    def tokens_of(self, lives: list[SequenceState]) -> Tensor:
        """The tokens of some of them [B], still on the device; none has guesses."""
        row = {live: at for at, live in enumerate(self.lives)}
        return self.tokens.index_select(0, upload([row[live] for live in lives], self.tokens.device))

    def read(self, pages: PageAllocator) -> list[tuple[SequenceState, int, float]]:
        """-> (request, token, logprob) in the order of the tokens; the host waits for the step here."""
        tokens, logprobs = read_draws(self.drawn.wait())
        if self.routes is not None:
            pages.note_routes(*(copy.wait() for copy in self.routes))
        return list(_accepted_rows(self.lives, tokens, logprobs))


def _accepted_rows(
    lives: list[SequenceState], tokens: list[int], logprobs: list[float]
) -> Iterator[tuple[SequenceState, int, float]]:
    """Of each request's rows those up to the first whose token is not the guess, that one
    included: the rows after it saw a wrong token.
    """
    at = 0
    for live in lives:
        guessed = len(live.guess)
        n = 1 + (matching_prefix_length(tokens[at : at + guessed], live.guess) if guessed else 0)
        for row in range(at, at + n):
            yield live, tokens[row], logprobs[row]
        at += 1 + guessed
