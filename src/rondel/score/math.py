"""Mathematical equality by math-verify: a^2 - 4 equals (a+2)(a-2)."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.types import Task, Trajectory
from rondel.score.answer_text import extract_answer, is_too_expensive, plain_number
from rondel.score.answer_time import AnswerTooSlow, limit_answer_time

# a gold answer of several values may come in several boxes
SEVERAL = re.compile(r"\\\{|\\(?:cup|pm)\b|,(?![0-9]{3}(?:[^0-9]|$))")
ONE = re.compile(r"[(\[][^()\[\]]*[)\]]")  # a point or an interval is one value, with its comma


class Math:
    r"""1.0 when the text's answer (boxed, in LaTeX, or plain) equals the gold one, else 0.0.

    Gold may be bare LaTeX: "\frac{1}{2}". math-verify's own time-outs are off: they turn into "not equal" whoever was
    late. The gold answer is read on the pool's clock, and a hang there is `Failed`. What an answer makes sympy compute
    (a tower of powers, an integral without a closed form) is the answer's own time: it is wrong before it is tried, or
    after half of the deadline; so is one at which math-verify raises.
    """

    maximum = 1.0

    def __init__(self, *, deadline: float = 10.0) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError("reward 'math' needs a package: pip install 'rondel[tasks]'") from error
        for name in ("math_verify.parser", "math_verify.grader"):  # they warn that the time-outs are off
            logging.getLogger(name).setLevel(logging.ERROR)
        self.parse, self.verify, self.deadline = math_verify.parse, math_verify.verify, deadline
        self.gold = lru_cache(maxsize=256)(self._parse_gold)  # a group asks G times about the same

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        answer = str(task.data["answer"])
        text = trajectory.text if SEVERAL.search(ONE.sub("", answer)) else extract_answer(trajectory.text)
        number, gold_number = plain_number(text), plain_number(extract_answer(answer))
        if number is not None and gold_number is not None:
            return float(number == gold_number)  # the same verdict a thousand times faster
        gold = self.gold(answer)
        if is_too_expensive(text):
            return 0.0
        try:
            with limit_answer_time(self.deadline):
                return self._agree(gold, self.parse(text, parsing_timeout=None))
        except AnswerTooSlow:
            return 0.0
        except Exception:
            self._agree(gold, gold)  # if it can be compared, what was raised is the answer's
            return 0.0

    def _agree(self, gold: list[Any], found: list[Any]) -> float:
        return float(self.verify(gold, found, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))

    def _parse_gold(self, answer: str) -> list[Any]:
        gold = self.parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the gold answer {answer!r:.80}")
        return gold
