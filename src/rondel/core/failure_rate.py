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


class RecentOutcomes:
    """`recent.add("timeout")`, or "" for what went well; `recent.above(0.05)` -> Share(12, 200,
    "timeout", 9), or None.
    """

    def __init__(self) -> None:
        self.outcomes: deque[str] = deque(maxlen=LAST)

    def add(self, reason: str) -> None:
        self.outcomes.append(reason)

    def failures_above(self, share: float) -> FailureShare | None:
        failed = [reason for reason in self.outcomes if reason]
        if len(self.outcomes) < LEAST or not len(failed) > share * len(self.outcomes):
            return None
        (most, times), *_ = Counter(failed).most_common(1)
        return FailureShare(len(failed), len(self.outcomes), most, times)
