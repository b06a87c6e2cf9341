"""What an engine of steps knows of one request."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rondel.core.types import FinishReason, Request


class StepRequest(Protocol):
    """One request in the engine: what has been drawn of it.

    prompt  numbers that the log knows it by
    point   [D] what its last step drew, or as many numbers
    mark    of its prompt in the log; 0 is not logged
    rows    of each step since it came
    """

    request: Request
    mark: int
    rows: list[np.ndarray]

    @property
    def prompt(self) -> list[int]: ...
    @property
    def point(self) -> np.ndarray: ...
    @property
    def step(self) -> int: ...  # how many are drawn
    @property
    def is_whole(self) -> bool: ...
    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None: ...
    def finish(self, reason: FinishReason) -> None: ...
    def fail(self, error: Exception) -> None: ...
