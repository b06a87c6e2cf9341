"""One request in the engine of actions: an observation that waits for its action."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request
from rondel.generate.engine.stepwise.answer import refuse_sampling
from rondel.generate.engine.stepwise.step_request import StepRequest

WHAT = "a policy of actions"


@dataclass(slots=True, eq=False)
class ActionRequest(StepRequest):
    """A request and its one step.

    observation  [O] float32
    dim          how many numbers are drawn
    chunk        (H, n): the last H·n of them are actions; (0, 0): none are
    """

    observation: np.ndarray
    dim: int
    chunk: tuple[int, int] = (0, 0)
    logprob: float = 0.0
    version: int = -1

    @classmethod
    def of(
        cls,
        request: Request,
        done: asyncio.Future[Completion],
        observed: int,
        dim: int,
        chunk: tuple[int, int] = (0, 0),
    ) -> ActionRequest:
        seen = request.observation
        if seen is None or seen.shape != (observed,) or seen.dtype != np.float32:
            found = "none" if seen is None else f"{seen.dtype} {list(seen.shape)}"
            raise UserError(f"an action wants an observation, float32 [{observed}], and the request has {found}")
        refuse_sampling(request.sampling, WHAT)
        return cls(request, done, seen, dim, chunk)

    @property
    def log_key(self) -> np.ndarray:
        """The prompt and the bits of the observation: the log gives an action back only where
        the world shows the same."""
        return np.concatenate([self.request.tokens, self.observation.view(np.int32)])

    @property
    def width(self) -> int:
        return self.dim

    @property
    def is_whole(self) -> bool:
        return self.is_begun

    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None:
        self.rows.append(np.concatenate([self.observation, drawn]))
        self.logprob, self.version = logprob, version

    def completion(self, reason: FinishReason) -> Completion:
        """The action, or chunk of them; its token is the action's number, 0 where it has none."""
        if not self.rows:
            return Completion.empty(reason, len(self.request.tokens))
        steps = ContinuousSteps(self.rows[0][None], len(self.observation))
        given = [0 if self.dim > 1 else int(self.rows[0][-1])]
        n, size = self.chunk
        actions = steps.drawn[0, self.dim - n * size :].reshape(n, size) if n else None
        drawn = (given, [self.logprob], [self.version])
        return Completion(*drawn, reason, text="", steps=steps, actions=actions)  # type: ignore[arg-type]
