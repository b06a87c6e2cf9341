"""What a reward returned, read as a `Score` or as a `Failed`: the only place that decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from rondel.core.types import Failed, Score, Trajectory, unwrap_scalar
from rondel.text.unicode import valid_unicode


def read_score(returned: Any) -> Score | Failed:
    """A finite number is a score, and so are (position, value) pairs: they add up, and each keeps its place. A number
    of numpy or torch, a truth value among them, is the number it holds.

    Named parts of either form are a score: their "total" if they have one, else their sum. A `Score` is taken as it is.

    read(1) -> Score(1.0) · read({"correct": 1.0, "format": 0.2}) -> Score(1.2, parts) ·
    read([(9, 0.5), (31, 1.0)]) -> Score(1.5, steps) read(None) -> Failed("returned None") ·
    read(Failed("no compiler")) -> the same
    """
    if isinstance(returned, Failed):
        return returned
    if isinstance(returned, Score):
        numbers = [returned.value, *returned.parts.values(), *(value for _, value in returned.steps)]
        return next((Failed(_describe_invalid(x), "in a Score") for x in numbers if not _is_number(x)), returned)
    if not isinstance(returned, dict):
        return _read_part(returned)
    parts = {valid_unicode(str(name)): _read_part(part) for name, part in returned.items()}
    for name, part in parts.items():
        if isinstance(part, Failed):
            return Failed(part.reason, f"in part '{name}'" + (f": {part.detail}" if part.detail else ""))
    scores = {name: part for name, part in parts.items() if isinstance(part, Score)}
    if not scores:
        return Failed("returned no parts")
    total = scores.pop("total", None)
    value = sum(part.value for part in scores.values()) if total is None else total.value
    steps = [step for part in scores.values() for step in part.steps]
    if not _is_number(value):
        return Failed(_describe_invalid(value), "as the sum of its parts")
    return Score(value, {name: part.value for name, part in scores.items()}, tuple(steps))


def check_score(score: Score | Failed, trajectory: Trajectory) -> Score | Failed:
    """The same, or the fault in its numbers or in the positions of its steps. A text that
    was never tokenised has no positions.
    """
    score = read_score(score)
    if isinstance(score, Score) and trajectory.tokens:
        try:
            score.token_rewards(trajectory.mask)
        except ValueError as error:
            return Failed("misplaced a reward", str(error))
    return score


def check_group(returned: Any, trajectories: Sequence[Trajectory]) -> list[Score | Failed]:
    """What a groupwise reward returned: one score an answer, in their order. A fault of the whole is that of each."""
    if isinstance(returned, Failed):
        return [returned] * len(trajectories)
    if len(getattr(returned, "shape", ())) == 1:  # numbers of numpy or torch
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != len(trajectories):
        what = f"{len(returned)} scores" if isinstance(returned, list | tuple) else f"a {type(returned).__name__}"
        return [Failed("graded another group", f"{len(trajectories)} answers got {what}")] * len(trajectories)
    return [check_score(score, trajectory) for score, trajectory in zip(returned, trajectories)]


def _read_part(returned: Any) -> Score | Failed:
    """A number, or a list of (position, value)."""
    returned = unwrap_scalar(returned)
    if not isinstance(returned, list | tuple):
        return Score(float(returned)) if _is_number(returned) else Failed(_describe_invalid(returned))
    if not returned or not all(isinstance(step, list | tuple) and len(step) == 2 for step in returned):
        return Failed(_describe_invalid(returned), "steps are a list of (position, value), at least one")
    returned = [(position, unwrap_scalar(value)) for position, value in returned]
    for position, value in returned:
        if not isinstance(position, Integral) or isinstance(position, bool):
            return Failed("misplaced a reward", f"position {position!r} is not a whole number")
        if not _is_number(value):
            return Failed(_describe_invalid(value), f"at position {position}")
    try:
        return Score(math.fsum(value for _, value in returned), steps=tuple(returned))
    except OverflowError:
        return Failed("returned inf", "as the sum of its steps")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _describe_invalid(value: Any) -> str:
    if value is None or isinstance(value, Real):
        # None, nan, inf
        return "returned an integer beyond all floats" if isinstance(value, int) else f"returned {value}"
    return f"returned {type(value).__name__}"
