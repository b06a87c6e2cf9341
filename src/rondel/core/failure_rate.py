"""How many of the last outcomes failed, and by what most."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

LAST, LEAST = 200, 40  # outcomes that are looked at, and before which nothing is said


class FailureShare(NamedTuple):
    """`failed` of the last `of`; `times` of them by `most`."""

    failed: int
    of: int
    most: str
    times: int


class RecentOutcomes(deque[str]):
    """`recent.append("timeout")`, or "" for what went well; `recent.failures_above(0.05)` -> FailureShare(12, 200,
    "timeout", 9), or None.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=LAST)

    def failures_above(self, share: float) -> FailureShare | None:
        failed = [reason for reason in self if reason]
        if len(self) < LEAST or not len(failed) > share * len(self):
            return None
        (most, times), *_ = Counter(failed).most_common(1)
        return FailureShare(len(failed), len(self), most, times)
