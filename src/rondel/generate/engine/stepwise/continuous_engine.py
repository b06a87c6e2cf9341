"""An engine whose steps are points or actions: of a model with a `StepHead`, each step logged as it is drawn."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rondel.core.protocols import Transport
from rondel.core.types import Completion, Request
from rondel.generate.engine.stepwise.engine import StepwiseEngine
from rondel.generate.engine.stepwise.step_log import StepLog
from rondel.generate.engine.stepwise.step_request import StepRequest

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.runtime.journal.wal import TokenLog

S = TypeVar("S", bound=StepRequest)


class ContinuousEngine(StepwiseEngine[S]):
    """The Engine protocol over a `LoadedModel` with a `StepHead`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        run: Callable[..., Awaitable[Any]],
        max_running: int = 64,
        version: int = 0,
        transports: Mapping[str, Transport] | None = None,
        log: TokenLog | None = None,
    ) -> None:
        super().__init__(loaded, run=run, max_running=max_running, version=version, transports=transports)
        self.log = StepLog(log)
        self.head: Any = loaded.head  # a StepHead

    @abstractmethod
    def open_request(self, request: Request, done: asyncio.Future[Completion]) -> S:
        """Of which nothing is drawn yet. UserError where it cannot be drawn."""

    def begin_answer(self, request: Request, done: asyncio.Future[Completion]) -> S:
        answer = self.open_request(request, done)
        self.log.restore(answer)
        return answer

    def keep_step(self, answers: list[S], steps: list[tuple[np.ndarray, float]], version: int) -> int:
        self.log.record_step(answers, steps, version)
        for answer, (point, density) in zip(answers, steps, strict=True):
            answer.append(point, density, version)
        return len(answers)

    def score_tokens(self, tokens: list[int]) -> list[float]:
        return self.head.score_prompt(tokens)

    def record_version(self, version: int, root: str) -> None:
        self.log.record_version(version, root)
