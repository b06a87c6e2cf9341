"""A filter of your own: `task.filters = [{ kind = "my_filter:TooEasy", above = 0.9 }]`.

A filter says of a group of scored answers whether it is worth training on. The reason is counted in the ledger.
"""

from rondel.core.types import KEEP, Verdict


class TooEasy:
    """Drops a group whose mean reward is above a bound: there is little left to learn from it."""

    def __init__(self, above=0.9):
        self.above = above

    def __call__(self, group):
        mean = sum(group.rewards) / len(group.rewards)
        return Verdict(False, "too easy") if mean > self.above else KEEP
