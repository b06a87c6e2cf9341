"""What one step of the engine computes."""

from __future__ import annotations

from dataclasses import dataclass

from rondel.generate.engine.builtin.request import SequenceState


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
