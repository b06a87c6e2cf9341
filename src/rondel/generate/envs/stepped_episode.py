"""An episode of observations and actions while it is played, in a world or in a model of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import Completion, Score, Trajectory

GIVEN = 0  # the token before the first step, which a trajectory must begin with


@dataclass
class SteppedEpisode:
    """T steps so far, each with what it was drawn from, what it drew, and what it earned.

    trajectory  becomes the episode
    observed    how many numbers of a step were read
    last        what was shown behind the last step
    taken       actions that the world took
    ended       "ended" where the world ended it, "cut off" where it goes on; "" while it is played
    """

    trajectory: Trajectory
    observed: int
    rewards: list[float] = field(default_factory=list)
    last: np.ndarray | None = None
    taken: int = 0
    ended: str = ""
    rows: list[np.ndarray] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def x(self) -> np.ndarray:
        """[T, O] what was read."""
        return np.stack(self.rows)[:, : self.observed]

    @property
    def drawn(self) -> np.ndarray:
        """[T, D]"""
        return np.stack(self.rows)[:, self.observed :]

    def add(self, done: Completion, reward: float, last: np.ndarray, ended: str, *, taken: int = 1) -> None:
        """One step more, of so many actions."""
        assert isinstance(done.steps, ContinuousSteps)
        self.tokens.append(done.tokens[0])
        self.logprobs.append(done.logprobs[0])
        self.versions.append(done.versions[0])
        self.rows.append(done.steps.rows[0])
        self.rewards.append(reward)
        self.last, self.ended, self.taken = last, ended, self.taken + taken

    def finish(self) -> Trajectory:
        """Each reward is earned at its step; where the episode was cut off, what came then stands behind it."""
        steps = ContinuousSteps(np.stack(self.rows), self.observed, self.last if self.ended == "cut off" else None)
        t = self.trajectory
        if not t.tokens:
            t.extend([GIVEN])
        first = len(t.tokens)
        t.extend(self.tokens, logprobs=self.logprobs, versions=self.versions, steps=steps)
        t.score = Score(math.fsum(self.rewards), steps=tuple(enumerate(self.rewards, first)))
        t.finish_reason = "stop" if self.ended == "ended" else "length"
        chunks = f" in {len(self)} chunks" if self.taken > len(self) else ""
        t.text = f"{self.taken} steps{chunks}, return {t.score.value:g}, {self.ended}"
        return t
