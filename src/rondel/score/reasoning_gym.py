"""The scorer of the reasoning-gym data set that a task came from."""

from __future__ import annotations

import re
from collections.abc import Callable

from rondel.core.errors import ConfigError
from rondel.core.types import Task, Trajectory
from rondel.score.answer_time import AnswerTooSlow, limit_answer_time
from rondel.score.number import NUMBER


def strip_text(text: str) -> str:
    """The whole text, without the space around it."""
    return text.strip()


def last_number(text: str) -> str | None:
    """The last number, as it was written."""
    found = [match.group() for match in NUMBER.finditer(text)]
    return found[-1] if found else None


def last_tagged_answer(text: str) -> str | None:
    """What stands in the last <answer>...</answer>."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


EXTRACT: dict[str, Callable[[str], str | None]] = {
    "raw": strip_text,
    "last_number": last_number,
    "tag": last_tagged_answer,
}


class ReasoningGym:
    """Scores in [0, 1]; the data set gives part of it for part of an answer. Needs tasks of kind "reasoning_gym".

    An answer at which the data set's scorer raises or computes for half of the deadline is worth 0, as long as the
    scorer can read the data set's own answer.
    """

    def __init__(self, *, extract: str = "raw", deadline: float = 10.0) -> None:
        try:
            from reasoning_gym import get_score_answer_fn
        except ImportError as error:
            raise ConfigError("reward 'reasoning_gym' needs a package: pip install 'rondel[tasks]'") from error
        if extract not in EXTRACT:
            raise ConfigError(f"reward 'reasoning_gym': extract = {extract!r}; it must be one of {', '.join(EXTRACT)}")
        self.extract, self.scorer = EXTRACT[extract], get_score_answer_fn
        self.deadline = deadline
        self.scorers: dict[str, Callable[..., float]] = {}

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        entry = task.data["entry"]
        name = entry["metadata"]["source_dataset"]
        if name not in self.scorers:
            self.scorers[name] = self.scorer(name)
        score = self.scorers[name]
        try:
            with limit_answer_time(self.deadline):
                return score(answer=self.extract(trajectory.text), entry=entry)
        except AnswerTooSlow:
            return 0.0
        except Exception:
            score(answer=str(entry["answer"]), entry=entry)  # if it can be read, what was raised is the answer's
            return 0.0
