"""One request in the engine of actions: an observation that waits for its action."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request, Sampling


@lru_cache(64)
def refuse_sampling(sampling: Sampling) -> None:
    """What has no meaning for actions. `temperature` scales logits or the standard deviation."""
    plain = Sampling()
    read = ("temperature", "max_tokens", "n", "seed", "ignore_eos")
    odd = [name for name in Sampling.__slots__ if name not in read and getattr(sampling, name) != getattr(plain, name)]
    if odd:
        raise UserError(
            f"sampling.{odd[0]} = {getattr(sampling, odd[0])!r} with a policy of actions: it is about tokens, leave it out"
        )


@dataclass(slots=True, eq=False)
class ActionRequest:
    """A request and its one step.

    observation  [O] float32
    point        as many numbers as an action has
    """

    request: Request
    done: asyncio.Future[Completion]
    observation: np.ndarray
    point: np.ndarray
    mark: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    logprob: float = 0.0
    version: int = -1

    @classmethod
    def of(cls, request: Request, done: asyncio.Future[Completion], observed: int, dim: int) -> ActionRequest:
        seen = request.observation
        if seen is None or seen.shape != (observed,) or seen.dtype != np.float32:
            found = "none" if seen is None else f"{seen.dtype} {list(seen.shape)}"
            raise UserError(f"an action wants an observation, float32 [{observed}], and the request has {found}")
        refuse_sampling(request.sampling)
        return cls(request, done, seen, np.zeros(dim, np.float32))

    @property
    def prompt(self) -> list[int]:
        """The bits of the observation: the log gives an action back only where the world shows the same."""
        bits: list[int] = self.observation.view(np.int32).tolist()
        return bits

    @property
    def step(self) -> int:
        return len(self.rows)

    @property
    def is_begun(self) -> bool:
        return bool(self.rows)

    @property
    def drawn(self) -> str:
        return f"{self.step} actions"

    @property
    def is_whole(self) -> bool:
        return bool(self.rows)

    def append(self, drawn: np.ndarray, logprob: float, version: int) -> None:
        self.rows.append(np.concatenate([self.observation, drawn]))
        self.logprob, self.version = logprob, version

    def finish(self, reason: FinishReason) -> None:
        """Its caller gets the action; its token is the action's number, 0 where it has none."""
        if self.done.done():
            return
        if not self.rows:
            self.done.set_result(Completion.empty(reason, len(self.request.tokens)))
            return
        steps = ContinuousSteps(self.rows[0][None], len(self.observation))
        given = [0 if len(self.point) > 1 else int(self.rows[0][-1])]
        self.done.set_result(
            Completion(given, [self.logprob], [self.version], reason, text="", steps=steps)  # type: ignore[arg-type]
        )

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
