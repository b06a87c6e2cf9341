"""What the suite runs of a product of axes: a covering set. The rest of the product is marked `sweep`, and `make sweeps` runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

left_out = False  # set by conftest.py where nobody asks for sweeps: cases that are not collected take no time


def covering(cases: Iterable[Any], chosen: Collection[Any], *, fast: Collection[Any] | None = None) -> list[Any]:
    """Parameters of a test, one for each of `cases` (a tuple holds several values), in their order.

    Those not in `chosen` are left to `make sweeps`, and `make test` does not collect them. `fast`: those of them in
    `make check`; by default the marks of the test decide. What is chosen or fast and is no case is an error: a renamed
    case would silently lose its place.
    """
    every = list(cases)
    if strangers := [c for c in (*chosen, *(fast or ())) if c not in every]:
        raise ValueError(f"{strangers} are not among the cases: {every}")
    found = []
    if left_out and chosen and all(map(_names_itself, every)):
        every = [case for case in every if case in chosen]
    for case in every:
        marks = [] if fast is None or case in fast else [pytest.mark.slow]
        if case not in chosen:
            marks = [pytest.mark.slow, pytest.mark.sweep]
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found


def _names_itself(case: Any) -> bool:
    """Whether pytest names it by its values: others are numbered, and keep their numbers."""
    return all(isinstance(value, str | int | float | None) for value in (case if isinstance(case, tuple) else (case,)))
