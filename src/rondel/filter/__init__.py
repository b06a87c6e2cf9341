"""Stage 3: is a group worth training on? Group -> Verdict(keep, reason). A dropped
group is counted by its reason (law 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rondel.core.protocols import Filter
from rondel.core.types import KEEP, Group, Verdict
from rondel.filter.complete import Complete
from rondel.filter.length import truncated
from rondel.filter.repetition import Repetition
from rondel.filter.signal import signal
from rondel.filter.stub import stub

FILTERS: dict[str, Callable[..., Filter]] = {
    "complete": Complete,
    "signal": lambda: signal,
    "truncated": lambda: truncated,
    "repetition": Repetition,
    "stub": lambda: stub,
}


def chain_filters(filters: Iterable[Filter]) -> Filter:
    """One judge out of many: the first verdict that does not keep the group, else KEEP."""
    filters = tuple(filters)
    if len(filters) == 1:
        return filters[0]

    def apply_filters(group: Group) -> Verdict:
        return next((verdict for each in filters if not (verdict := each(group)).keep), KEEP)

    return apply_filters
