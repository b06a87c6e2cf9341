"""One request in the flow engine: a point on its way from noise to data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request, Sampling
from rondel.models.flow.transition import draw_normal, step_coefficients

SHOWN = 8  # numbers of a point that its text has


def refuse_sampling(sampling: Sampling) -> None:
    """What has no meaning for points. `temperature` is the eta of a step, `max_tokens` how many steps there are."""
    plain = Sampling()
    read = ("temperature", "max_tokens", "n", "seed", "ignore_eos")
    odd = [name for name in Sampling.__slots__ if name not in read and getattr(sampling, name) != getattr(plain, name)]
    if odd:
        raise UserError(
            f"sampling.{odd[0]} = {getattr(sampling, odd[0])!r} with a flow, which draws points and not tokens: leave it "
            "out. temperature is the noise of a step, max_tokens how many steps there are"
        )


@dataclass(slots=True, eq=False)
class Chain:
    """A request and what has been drawn of it.

    first    steps that were drawn before this request, whose points it brought
    rows     of each step since, as `ContinuousSteps.rows`
    numbers  [K, 4] sigma, scale_x, scale_v and std of the steps of the whole chain
    mark     of its prompt in the log; 0 is not logged
    """

    request: Request
    done: asyncio.Future[Completion]
    prompt: list[int]
    first: int
    numbers: np.ndarray
    point: np.ndarray
    mark: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, done: asyncio.Future[Completion], dim: int) -> Chain:
        refuse_sampling(request.sampling)
        first = request.continuation
        given = request.steps if isinstance(request.steps, ContinuousSteps) else None
        drawn = 0 if given is None else len(given)
        if drawn != first:
            raise UserError(f"a chain that goes on from step {first} with the points of {drawn} steps: bring them all")
        steps = first + request.sampling.max_tokens
        numbers = step_coefficients(steps, request.sampling.temperature).astype(np.float32)
        point = draw_normal(request.key, 0, dim) if given is None else given.drawn[-1]
        prompt = list(request.tokens[: len(request.tokens) - first])
        if not prompt:
            raise UserError("a request without a prompt: a flow needs one token at least to be asked with")
        return cls(request, done, prompt, first, numbers, point)

    @property
    def step(self) -> int:
        """How many steps of the whole chain are drawn."""
        return self.first + len(self.rows)

    @property
    def is_begun(self) -> bool:
        return bool(self.rows)

    @property
    def drawn(self) -> str:
        return f"{self.step} steps"

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

    def finish(self, reason: FinishReason) -> None:
        """Its caller gets what has been drawn."""
        if self.done.done():
            return
        width = 2 * len(self.point) + self.numbers.shape[1]
        rows = np.stack(self.rows) if self.rows else np.empty((0, width), np.float32)
        tokens = list(range(self.first, self.step))
        text = describe_point(self.point) if reason == "stop" else ""
        self.done.set_result(
            Completion(
                tokens,  # type: ignore[arg-type]
                self.logprobs,  # type: ignore[arg-type]
                self.versions,  # type: ignore[arg-type]
                reason,
                prompt_tokens=len(self.prompt),
                text=text,
                steps=ContinuousSteps(rows),
            )
        )

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def describe_point(point: np.ndarray) -> str:
    """A point as a reader of rollouts sees it: its first numbers."""
    return " ".join(f"{number:.3f}" for number in point[:SHOWN]) + " ..." * (len(point) > SHOWN)
