"""Mathematical equality by math-verify: a^2 - 4 equals (a+2)(a-2)."""

from __future__ import annotations

import logging

from rondel.words.errors import ConfigError
from rondel.words.types import Task, Trajectory


class Math:
    r"""1.0 when the text's answer (boxed, in LaTeX, or plain) equals the gold one, else 0.0.

    Gold may be bare LaTeX: "\frac{1}{2}". math-verify's own time-outs are alarms that work in a main thread only and turn into
    "not equal"; they are off, and the pool's wall clock is the one deadline: a hang becomes `Failed`, not a 0.
    """

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError("reward 'math' needs a package: pip install 'rondel[tasks]'") from error
        for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the time-outs are off
            logging.getLogger(name).setLevel(logging.ERROR)
        self.parse, self.verify = math_verify.parse, math_verify.verify

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        answer = str(task.data["answer"])
        gold = self.parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the gold answer {answer!r:.80} of {task.id}")
        said = self.parse(trajectory.text, parsing_timeout=None)
        return float(self.verify(gold, said, timeout_seconds=None, raise_on_error=True))
