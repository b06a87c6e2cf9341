"""Does the text keep to a form?"""

from __future__ import annotations

import re

from rondel.core.errors import ConfigError
from rondel.core.types import Task, Trajectory


class Format:
    r"""1.0 when the text matches, else 0.0: `Format(tag="answer")` wants exactly one
    <answer>...</answer>, `Format(pattern=r"#### \d+$")` wants the pattern somewhere."""

    maximum = 1.0

    def __init__(self, *, tag: str | None = None, pattern: str | None = None) -> None:
        if (tag is None) == (pattern is None):
            raise ConfigError("reward 'format' needs one of tag = 'answer' or pattern = '...'")
        try:
            self.pattern = re.compile(pattern or "", re.DOTALL)
        except re.error as error:
            raise ConfigError(f"reward 'format': pattern = {pattern!r} is no regular expression: {error}") from error
        self.tag = tag

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        text = trajectory.text
        if self.tag is None:
            return float(self.pattern.search(text) is not None)
        opened, closed = f"<{self.tag}>", f"</{self.tag}>"
        return float(text.count(opened) == text.count(closed) == 1 and text.index(opened) < text.index(closed))
