"""What an engine of points or actions knows of one request."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rondel.generate.engine.stepwise.control import Answer


class StepRequest(Answer, Protocol):
    """One request in the engine.

    mark    of its prompt in the log; 0 is not logged
    prompt  numbers that the log knows it by
    point   [D] what its last step drew, or as many numbers
    step    how many steps are drawn
    """

    mark: int

    @property
    def prompt(self) -> list[int]: ...
    @property
    def point(self) -> np.ndarray: ...
    @property
    def step(self) -> int: ...
    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None: ...
