"""The token log of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rondel.generate.engine.stepwise.answer_log import AnswerLog, as_halves
from rondel.generate.engine.stepwise.step_request import StepRequest


class StepLog(AnswerLog[StepRequest]):
    """Each step is a row of the log, its token the number of the step, with the float32 numbers that it drew."""

    def restore(self, answer: StepRequest) -> None:
        for found, halves in self.recall(answer, answer.log_key, answer.step, answer.width):
            if answer.is_whole or found.routes[0] != answer.step:
                break
            answer.append(halves.view(np.float32), found.logprob, found.version)

    def record_step(self, answers: Sequence[StepRequest], drawn: list[tuple[np.ndarray, float]], version: int) -> None:
        """The step that these take together, before anyone sees it."""
        if self.log is None:
            return
        rows, points = [], []
        for own, (point, density) in zip(answers, drawn, strict=True):
            if own.mark:
                rows.append((own.request.key, own.step, own.mark, density, own.step, version))
                points.append((own.step, as_halves(np.asarray(point, np.float32))))
        self.log.write(rows, points)
