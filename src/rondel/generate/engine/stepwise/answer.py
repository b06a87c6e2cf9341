"""A request of a stepwise engine, and what has been drawn of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request, Sampling

OnToken = Callable[[int, float, int, None], None]  # token, log-probability, version, no likeliest others
READ = ("temperature", "max_tokens", "n", "seed", "ignore_eos")  # settings of sampling that such an engine reads


@dataclass(slots=True, eq=False)
class Answer(ABC):
    """done  what its caller waits for
    mark  of its prompt in the log; 0 is not logged
    on_token  is told of tokens that no later step takes back
    """

    request: Request
    done: asyncio.Future[Completion]
    mark: int = field(default=0, kw_only=True)
    on_token: OnToken | None = field(default=None, kw_only=True)

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

    @abstractmethod
    def completion(self, reason: FinishReason) -> Completion:
        """What has been drawn."""

    def finish(self, reason: FinishReason) -> None:
        """Its caller gets what has been drawn."""
        if not self.done.done():
            self.done.set_result(self.completion(reason))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


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
