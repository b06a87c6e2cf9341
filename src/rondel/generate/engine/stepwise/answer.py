"""A request of a stepwise engine, and what has been drawn of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from rondel.core.errors import LawError, UserError
from rondel.core.types import Completion, FinishReason, Request, Sampling, Stint

OnToken = Callable[[int, float, int, None], None]  # token, log-probability, version, no likeliest others
READ = ("temperature", "max_tokens", "n", "seed", "ignore_eos")  # settings of sampling that such an engine reads


@dataclass(slots=True, eq=False)
class Answer(ABC):
    """done  what its caller waits for
    mark  of its prompt in the log; 0 is not logged
    on_token  is told of tokens that no later step takes back
    stints    how far it was whenever the weights changed, and at its end
    line      which of the request's lines it makes for, where a recorded run is repeated
    """

    request: Request
    done: asyncio.Future[Completion]
    mark: int = field(default=0, kw_only=True)
    on_token: OnToken | None = field(default=None, kw_only=True)
    stints: list[Stint] = field(default_factory=list, kw_only=True)
    line: int = field(default=0, kw_only=True)

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """Whether anything was drawn here."""

    @property
    @abstractmethod
    def is_whole(self) -> bool: ...

    @property
    @abstractmethod
    def drawn(self) -> str:
        """How far it is, for a reader of errors."""

    @property
    @abstractmethod
    def reached(self) -> tuple[int, int]:
        """Steps taken of it, and tokens that they have completed."""

    @abstractmethod
    def completion(self, reason: FinishReason) -> Completion:
        """What has been drawn."""

    def finish(self, reason: FinishReason, version: int) -> None:
        """Its caller gets what has been drawn."""
        self.append_version_span(version)
        if not self.done.done():
            completion = self.completion(reason)
            completion.stints = self.stints
            self.done.set_result(completion)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    # -- a run that is recorded, and its repetition ----------------------------------------------

    def append_version_span(self, version: int) -> None:
        """Note how far these weights have taken it."""
        if self.reached != (self.stints[-1][1:] if self.stints else (0, 0)):
            self.stints.append((version, *self.reached))

    def stands_still(self, version: int) -> bool:
        """Whether it takes no step under these weights, or none any more, because it took none when it was recorded."""
        if (lines := self.request.lines) is None:
            return False
        return self.line == len(lines) or lines[self.line][0] != version or lines[self.line][1:] == self.reached

    def follow_lines(self, version: int) -> None:
        """These weights serve: it makes for the next line behind those of earlier ones."""
        for at, *reached in (self.request.lines or ())[self.line :]:
            if at >= version:
                break
            if tuple(reached) != self.reached:
                raise LawError(
                    f"version {version} came when a request had taken (steps, tokens) = {self.reached}; in the run "
                    f"that is replayed version {at} took it to {tuple(reached)}"
                )
            self.line += 1


@lru_cache(64)
def refuse_sampling(sampling: Sampling, what: str) -> None:
    """UserError for settings that belong to text which is written one token after the other."""
    plain = Sampling()
    odd = [name for name in Sampling.__slots__ if name not in READ and getattr(sampling, name) != getattr(plain, name)]
    if odd:
        raise UserError(
            f"sampling.{odd[0]} = {getattr(sampling, odd[0])!r} with {what}: it is about text that is written token "
            "after token; leave it out"
        )


def refuse_overlong(request: Request, context: int) -> None:
    """UserError where prompt and answer do not fit into the `context` tokens of a model that reads by positions."""
    if len(request.tokens) + request.sampling.max_tokens > context:
        raise UserError(
            f"{len(request.tokens)} tokens and max_tokens = {request.sampling.max_tokens} do not fit into a "
            f"context of {context}; set max_position_embeddings of the model"
        )
