"""One request in the flow engine: a point on its way from noise to data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request
from rondel.generate.engine.stepwise.answer import refuse_sampling
from rondel.generate.engine.stepwise.step_request import StepRequest
from rondel.models.flow.transition import step_coefficients
from rondel.models.noise import draw_normal

SHOWN = 8  # numbers of a point that its text has


WHAT = "a flow, which draws points and not tokens"


@dataclass(slots=True, eq=False)
class Chain(StepRequest):
    """A request and what has been drawn of it.

    first    steps that were drawn before this request, whose points it brought
    numbers  [K, 4] sigma, scale_x, scale_v and std of the steps of the whole chain
    """

    prompt: list[int]
    first: int
    numbers: np.ndarray
    point: np.ndarray
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, done: asyncio.Future[Completion], dim: int) -> Chain:
        refuse_sampling(request.sampling, WHAT)
        first = request.continuation
        given = request.steps if isinstance(request.steps, ContinuousSteps) else None
        drawn = 0 if given is None else len(given)
        if drawn != first:
            raise UserError(f"a chain that goes on from step {first} with the points of {drawn} steps: bring them all")
        steps = first + request.sampling.max_tokens
        numbers = step_coefficients(steps, request.sampling.temperature).astype(np.float32)
        begins = request.key if request.start_key is None else request.start_key
        point = given.drawn[-1] if given is not None and drawn else draw_normal(begins, 0, dim)
        prompt = list(request.tokens[: len(request.tokens) - first])
        if not prompt:
            raise UserError("a request without a prompt: a flow needs one token at least to be asked with")
        return cls(request, done, prompt, first, numbers, point)

    @property
    def step(self) -> int:
        """How many steps of the whole chain are drawn."""
        return self.first + len(self.rows)

    @property
    def log_key(self) -> list[int]:
        return self.prompt

    @property
    def width(self) -> int:
        return len(self.point)

    @property
    def is_whole(self) -> bool:
        return self.step >= len(self.numbers)

    def noise(self) -> np.ndarray:
        """Of its next step."""
        return draw_normal(self.request.key, self.step + 1, len(self.point))

    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None:
        """One step more."""
        self.rows.append(np.concatenate([self.point, drawn, self.numbers[self.step]]))
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.point = drawn

    def completion(self, reason: FinishReason) -> Completion:
        width = 2 * len(self.point) + self.numbers.shape[1]
        rows = np.stack(self.rows) if self.rows else np.empty((0, width), np.float32)
        tokens = list(range(self.first, self.step))
        return Completion(
            tokens,  # type: ignore[arg-type]
            self.logprobs,  # type: ignore[arg-type]
            self.versions,  # type: ignore[arg-type]
            reason,
            prompt_tokens=len(self.prompt),
            text=describe_point(self.point) if reason == "stop" else "",
            steps=ContinuousSteps(rows),
        )


def describe_point(point: np.ndarray) -> str:
    """A point as a reader of rollouts sees it: its first numbers."""
    return " ".join(f"{number:.3f}" for number in point[:SHOWN]) + " ..." * (len(point) > SHOWN)
