"""Where runs of tokens occurred before in a request: guesses without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


LONGEST, SHORTEST = 4, 2  # tokens that must have occurred before


@dataclass(slots=True)
class NgramIndex:
    """Where each run of 2 to 4 tokens was last followed by something: {(a, b): place of what followed}.

    Runs that end with the newest token are not in it yet, so a look-up finds an earlier occurrence.
    """

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 1  # tokens whose predecessors are in it

    def draft_tokens(self, tokens: list[int], k: int) -> list[int]:
        """k tokens, or none. Only tokens that are new since the last call are read.

        >>> Grams().guess([7, 8, 9, 5, 7, 8], 3)
        [9, 5, 7]
        """
        for at in range(self.read, len(tokens)):
            for n in range(SHORTEST, min(LONGEST, at) + 1):
                self.follows[tuple(tokens[at - n : at])] = at
        self.read = max(self.read, len(tokens))
        for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            at = self.follows.get(tuple(tokens[-n:]), 0)
            if at:
                break
        else:
            return []
        out = tokens[at : at + k]
        while len(out) < k:  # the occurrences overlap: a period goes on
            out.append(out[len(out) - (len(tokens) - at)])
        return out
