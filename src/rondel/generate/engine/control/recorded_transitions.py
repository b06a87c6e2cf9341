"""A request to a learned model of a world: how likely is what the world itself did."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request
from rondel.generate.engine.stepwise.answer import refuse_sampling
from rondel.generate.engine.stepwise.step_request import StepRequest

WHAT = "a learned model of a world"


@dataclass(slots=True, eq=False)
class RecordedTransitions(StepRequest):
    """T transitions of one episode, scored in one step. They are not drawn here, so no log keeps them.

    sampling.max_tokens  predicted steps behind each other that are compared with the world
    errors               names of what is behind the T log-densities in the one row of its step
    """

    given: ContinuousSteps
    errors: tuple[str, ...]
    version: int = -1

    @classmethod
    def of(
        cls, request: Request, done: asyncio.Future[Completion], observed: int, dim: int, errors: tuple[str, ...]
    ) -> RecordedTransitions:
        given = request.steps
        if not isinstance(given, ContinuousSteps) or (given.observed, given.dim) != (observed, dim):
            raise UserError(
                f"recorded transitions have {observed} numbers of observation and action and {dim} of what followed; "
                "the request brings others"
            )
        refuse_sampling(request.sampling, WHAT)
        return cls(request, done, given, errors)

    @property
    def log_key(self) -> None:
        return None

    @property
    def width(self) -> int:
        return 0

    @property
    def is_whole(self) -> bool:
        return self.is_begun

    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None:
        self.rows.append(drawn)
        self.version = version

    def completion(self, reason: FinishReason) -> Completion:
        """A token and its log-density for each transition."""
        if not self.rows:
            return Completion.empty(reason, len(self.request.tokens))
        n, numbers = len(self.given), self.rows[0].tolist()
        measured = dict(zip(self.errors, numbers[n:], strict=True))
        drawn = ([0] * n, numbers[:n], [self.version] * n)
        return Completion(*drawn, reason, text="", steps=self.given, measured=measured)  # type: ignore[arg-type]
