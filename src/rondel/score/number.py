"""The last number of the text against the gold number, exactly."""

from __future__ import annotations

import re
from fractions import Fraction

from rondel.core.errors import ConfigError
from rondel.core.types import Task, Trajectory

# A minus is a sign unless something to subtract from stands right before it: "5-3" ends in 3, "= -3" in -3.
# The exponent and the digits are bounded, because a policy that writes 9e999999999 must cost nothing.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])(?P<sign>[-+\u2212\u2013])[$\u20ac\u00a3]?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE](?P<power>[-+]?[0-9]{1,3})(?![0-9]))?"
    r"(?:/(?P<below>[0-9]+)(?![0-9]|\.[0-9]))?"
)


def last_number(text: str) -> Fraction | None:
    """The last number in a text: "so 1,250.50" -> 2501/2, "x = -3/4" -> -3/4, "none" -> None."""
    found = None
    for found in NUMBER.finditer(text):  # noqa: B007
        pass
    return None if found is None else _parse_fraction(found)


def _parse_fraction(found: re.Match[str]) -> Fraction | None:
    digits, below = found["digits"].replace(",", ""), found["below"] or "1"
    if len(digits) + len(below) > 1000 or not int(below):
        return None
    value = Fraction(digits) * Fraction(10) ** int(found["power"] or 0) / int(below)
    return -value if found["sign"] in ("-", "\u2212", "\u2013") else value


class Number:
    """1.0 when the last number of the policy's text is the gold number, within `tolerance`; else 0.0.

    A gold answer without a number is a fault of the data: it raises, and becomes `Failed`.
    """

    maximum = 1.0

    def __init__(self, *, tolerance: float = 0.0) -> None:
        if not 0 <= tolerance < float("inf"):
            raise ConfigError(f"reward 'number': tolerance = {tolerance}; it must be a number of at least 0")
        self.tolerance = Fraction(str(tolerance))

    def __call__(self, trajectory: Trajectory, task: Task) -> float:
        gold = last_number(str(task.data["answer"]))
        if gold is None:
            raise ValueError(f"the gold answer {task.data['answer']!r:.80} of {task.id} has no number in it")
        said = last_number(trajectory.text)
        return float(said is not None and abs(said - gold) <= self.tolerance)
