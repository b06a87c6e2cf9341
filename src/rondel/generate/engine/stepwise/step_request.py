"""What an engine of points or actions knows of one request."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rondel.generate.engine.stepwise.answer import Answer


@dataclass(slots=True, eq=False)
class StepRequest(Answer):
    """rows  of each step since it came, as `ContinuousSteps.rows`"""

    rows: list[np.ndarray] = field(default_factory=list, kw_only=True)

    @property
    @abstractmethod
    def log_key(self) -> Sequence[int] | np.ndarray | None:
        """Numbers that the log knows it by. None: no log keeps it."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers a step draws."""

    @property
    def step(self) -> int:
        """How many steps are drawn."""
        return len(self.rows)

    @property
    def is_begun(self) -> bool:
        return bool(self.rows)

    @property
    def drawn(self) -> str:
        return f"{self.step} steps"

    @property
    def reached(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows)

    @abstractmethod
    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None:
        """One step more."""
