"""A group in which nobody came to an end says more about the budget than about the answers."""

from __future__ import annotations

from rondel.core.types import KEEP, Group, Verdict


def truncated(group: Group) -> Verdict:
    """Drop the group iff every one of its samples was cut off by the budget."""
    return Verdict(False, "truncated") if all(t.is_truncated for t in group.trajectories) else KEEP
