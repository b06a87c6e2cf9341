"""The token log of a stepwise engine: after a crash an answer goes on from where it was (law 15)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rondel.generate.engine.stepwise.answer import Answer

if TYPE_CHECKING:
    from rondel.runtime.journal.wal import TokenLog

A = TypeVar("A", bound=Answer)


class AnswerLog(ABC, Generic[A]):
    """Numbers beside a token stand where a mixture's routes do, as [1, 1, N] halves; without a log nothing is kept."""

    def __init__(self, log: TokenLog | None) -> None:
        self.log = log

    @abstractmethod
    def restore(self, answer: A) -> None:
        """Mark a new answer, and give it what it had drawn in an earlier life."""

    def recall(
        self, answer: A, prompt: Sequence[int] | np.ndarray | None, first: int, numbers: int
    ) -> Iterator[tuple[Any, np.ndarray]]:
        """Marks it. -> the tokens of an earlier life from the first on,
        each with so many numbers of 32 bits beside it"""
        request = answer.request
        if self.log is None or prompt is None or not request.key or request.namespace or request.wants:
            return
        answer.mark = self.log.context_hash(prompt)
        for found in self.log.recall_tokens(request.key, answer.mark, first=first):
            halves = None if found.routes is None else np.asarray(found.routes[1]).astype(np.uint16).reshape(-1)
            if halves is None or len(halves) != 2 * numbers:
                return  # of a run with another model
            yield found, halves

    def record_version(self, version: int, root: str) -> None:
        if self.log is not None:
            self.log.record_version(version, root)


def as_halves(numbers: np.ndarray) -> np.ndarray:
    """[1, 1, 2·N] of N numbers of 32 bits."""
    return np.ascontiguousarray(numbers).view(np.uint16).reshape(1, 1, -1)
