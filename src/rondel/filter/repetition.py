"""A group that mostly repeats itself has collapsed into a loop, whatever it was rewarded."""

from __future__ import annotations

from dataclasses import dataclass

from rondel.words.errors import ConfigError
from rondel.words.types import KEEP, Group, Trajectory, Verdict


@dataclass(frozen=True)
class Repetition:
    """Drop the group when, on average over its samples, more than `at_most` of the n-grams were seen before in the same sample.

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
        shares = [repeated(t, self.n) for t in group.trajectories]
        return Verdict(False, "repetitive") if sum(shares) > self.at_most * len(shares) else KEEP


def repeated(trajectory: Trajectory, n: int) -> float:
    """1 - distinct / all n-grams of the tokens the policy wrote; one that spans a given token does not count. 0 when there are none."""
    tokens, mask = trajectory.tokens, trajectory.mask
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1) if all(mask[i : i + n])]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
