"""A group that mostly repeats itself has collapsed into a loop, whatever it was rewarded."""

from __future__ import annotations

from dataclasses import dataclass

from rondel.algos.tokens import repeated_fraction
from rondel.core.errors import ConfigError
from rondel.core.types import KEEP, Group, Verdict


@dataclass(frozen=True)
class Repetition:
    """Drop the group when, on average over its samples, more than `at_most` of the
    n-grams were seen before in the same sample.

    n          tokens in one n-gram
    at_most    the share of repeated ones that is still normal
    """

    n: int = 8
    at_most: float = 0.5

    def __post_init__(self) -> None:
        if not self.n >= 1:
            raise ConfigError(f"n = {self.n}; an n-gram has at least 1 token")
        if not 0 <= self.at_most <= 1:
            raise ConfigError(f"at_most = {self.at_most}; it is a share in [0, 1]")

    def __call__(self, group: Group) -> Verdict:
        shares = [repeated_fraction(t.tokens, t.mask, self.n) or 0.0 for t in group.trajectories]
        return Verdict(False, "repetitive") if sum(shares) > self.at_most * len(shares) else KEEP
