"""What a reward returned, read as a `Score` or as a `Failed`: the only place that decides it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from rondel.words.types import Failed, Score


def read(returned: Any) -> Score | Failed:
    """A finite number is a score. Named parts are a score: their "total" if they have one, else their sum.

    read(1) -> Score(1.0) · read({"correct": 1.0, "format": 0.2}) -> Score(1.2, parts) · read(None) -> Failed("returned None")
    """
    if not isinstance(returned, dict):
        return Score(float(returned)) if _is_number(returned) else Failed(_complaint(returned))
    for name, part in returned.items():
        if not _is_number(part):
            return Failed(_complaint(part), f"in part '{name}'")
    parts = {str(name): float(part) for name, part in returned.items()}
    if not parts:
        return Failed("returned no parts")
    total = parts.pop("total", None)
    return Score(sum(parts.values()) if total is None else total, parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _complaint(value: Any) -> str:
    if value is None or isinstance(value, Real):
        return f"returned {value}"  # None, nan, inf
    return f"returned {type(value).__name__}"
