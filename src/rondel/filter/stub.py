"""A group of answers that say next to nothing."""

from __future__ import annotations

from rondel.core.types import KEEP, Group, Verdict

SHORT = 10  # characters that a single line must have


def stub(group: Group) -> Verdict:
    """Drop the group iff each of its answers is empty or one line of fewer than 10 characters.  arXiv:2604.01193.

    With `algo.group_size = 1` that leaves out single answers.
    """
    answers = [t.text.strip() for t in group.policy_samples if t.written]
    stubs = ["\n" not in answer and len(answer) < SHORT for answer in answers]
    return Verdict(False, "stub") if stubs and all(stubs) else KEEP
