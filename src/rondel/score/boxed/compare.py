"""Whether what a function returned is what was expected, as JSON can say it. Runs in the
box of the tests, too: standard library only.
"""

from __future__ import annotations

import math
from typing import Any

# by name: few values are fractions, and importing them takes its time
NUMBERS = {"int", "float", "Fraction", "Decimal"}


def values_equal(said: Any, wanted: Any) -> bool:
    """Equal, True not being 1 and NaN being NaN; floats to 1e-9 of their size. A list
    stands for a tuple too: JSON knows no other.
    """
    if isinstance(wanted, list | tuple):
        return isinstance(said, list | tuple) and len(said) == len(wanted) and all(map(values_equal, said, wanted))
    if isinstance(wanted, dict):
        return (
            isinstance(said, dict)
            and said.keys() == wanted.keys()
            and all(values_equal(said[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, bool) or isinstance(said, bool):
        return said is wanted
    if isinstance(wanted, float) or isinstance(said, float):
        return {type(said).__name__, type(wanted).__name__} <= NUMBERS and _is_close(said, wanted)
    return bool(said == wanted)


def _is_close(said: Any, wanted: Any) -> bool:
    if math.isnan(said) or math.isnan(wanted):
        return math.isnan(said) and math.isnan(wanted)
    return math.isclose(said, wanted, rel_tol=1e-9, abs_tol=1e-9)
