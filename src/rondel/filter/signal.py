"""Only a group whose rewards differ can teach: a unanimous one has no advantage."""

from __future__ import annotations

from rondel.core.types import KEEP, Group, Verdict


def signal(group: Group) -> Verdict:
    """Keep the group iff its rewards differ; a lone reward passes, having nothing to differ from.  arXiv:2503.14476."""
    rewards = group.rewards
    return Verdict(False, "unanimous") if len(rewards) > 1 and max(rewards) == min(rewards) else KEEP
