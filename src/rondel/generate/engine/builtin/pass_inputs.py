"""What one pass reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rondel.generate.engine.builtin.request import SequenceState

if TYPE_CHECKING:
    pass


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
