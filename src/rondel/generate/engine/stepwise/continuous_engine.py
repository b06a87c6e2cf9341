"""An engine whose steps are points or actions: of a model with a `StepHead`, each step logged as it is drawn."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from rondel.generate.engine.stepwise.engine import StepwiseEngine
from rondel.generate.engine.stepwise.step_log import StepLog
from rondel.generate.engine.stepwise.step_request import StepRequest

S = TypeVar("S", bound=StepRequest)


class ContinuousEngine(StepwiseEngine[S]):
    """The Engine protocol over a `LoadedModel` with a `StepHead`."""

    log_kind = StepLog
    log: StepLog

    @property
    def head(self) -> Any:
        return self.loaded.head

    def keep_step(self, answers: list[S], steps: list[tuple[np.ndarray, float]], version: int) -> int:
        self.log.record_step(answers, steps, version)
        for answer, (point, density) in zip(answers, steps, strict=True):
            answer.append(point, density, version)
        return len(answers)

    def score_tokens(self, tokens: list[int]) -> list[float]:
        scores: list[float] = self.head.score_prompt(tokens)
        return scores
