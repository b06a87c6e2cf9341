"""What a pool sends to a reward's process that serves many calls at once."""

from __future__ import annotations

from typing import NamedTuple

from rondel.core.types import Task, Trajectory


class ScoreJob(NamedTuple):
    """A call. `episode` is what the answer was called while it was written, where it was."""

    number: int
    asked: Trajectory | list[Trajectory]
    task: Task
    episode: int | None = None


class EarlyJob(NamedTuple):
    """An answer that is still being written: what it has so far, whose last turn may be `unfinished`."""

    number: int
    episode: int
    trajectory: Trajectory
    task: Task
    unfinished: bool


class OrderJob(NamedTuple):
    """ "sleep", "wake", or "forget" an episode."""

    number: int
    verb: str
    given: tuple[int, ...] = ()
