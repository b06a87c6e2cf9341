"""How much a policy repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any


def repeated_fraction(tokens: Sequence[int], mask: Sequence[Any], n: int) -> float | None:
    """1 - distinct / all n-grams of the tokens that the policy wrote; one that spans a given
    token does not count. None when there are none.
    """
    grams: list[tuple[int, ...]] = []
    for written, run in groupby(zip(tokens, mask), key=lambda pair: bool(pair[1])):
        if written:
            own = [token for token, _ in run]
            grams += [tuple(own[i : i + n]) for i in range(len(own) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None
