"""Typed events of the journal. A stage emits; it never imports a logger.
Subscribers read: journal, telemetry, progress.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import StalledError
from rondel.core.types import Group
from rondel.text.unicode import visible_text


@dataclass(slots=True)
class Event:
    """Base of all events; the journal adds time and sequence number."""


@dataclass(slots=True)
class RunStarted(Event):
    folder: str
    config_hash: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Resumed(Event):
    """Supersedes every event after `step` that the journal already holds."""

    step: int
    version: int
    checkpoint: str


@dataclass(slots=True)
class Admitted(Event):
    number: int
    task: str
    version: int


@dataclass(slots=True)
class GroupFinished(Event):
    """A group left Filter: kept, or dropped with its reason."""

    number: int
    task: str
    born: int
    kept: bool
    reason: str
    rewards: list[float]
    lengths: list[int]
    failed: int = 0
    truncated: int = 0
    source: str = ""  # that brought the task, where there are several
    supervised: bool = False  # of the supervised phase: nothing was drawn and nothing scored
    # episodes of it by what is to be known of them: {"drift_thought": 3, "out_of_turns": 1}
    episodes: dict[str, int] = field(default_factory=dict)
    # what its episodes used of sandboxes: {"episodes": 8, "seconds": 41.2, "cpu": 3.1, "peak": 31457280}
    boxes: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RewardCounts(Event):
    """What a reward spent since it last said so: {"judge_calls": 12, "judge_cache_hits": 4, "judge_seconds": 7.5}."""

    counts: dict[str, float]


@dataclass(slots=True)
class GroupsTaken(Event):
    """Consumed by the learner. The group objects go to the rollout store; the journal keeps the numbers."""

    step: int
    version: int
    groups: list[Group]
    limit: int = 0  # of their lag


@dataclass(slots=True)
class Replayed(Event):
    """Groups of earlier steps that are trained once more, by their numbers, and how many versions the oldest is old."""

    step: int
    groups: list[int]
    oldest: int = 0


@dataclass(slots=True)
class StepDone(Event):
    step: int
    version: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    ledger: dict[str, int]
    note: str = ""


@dataclass(slots=True)
class Synced(Event):
    version: int
    root: str
    seconds: float
    bytes_copied: int
    probe_gap: float
    paused: float = 0.0  # seconds in which the engines stood still for it; 0 where they stood still anyway


@dataclass(slots=True)
class Resident(Event):
    """Bytes on a shared device in the phases generate, train and sync of one step: the
    peak, and who held them at the phase's end.
    """

    peak: dict[str, int]
    held: dict[str, dict[str, int]]


@dataclass(slots=True)
class WorkerTime(Event):
    """What a worker did since it last said so: {"generate": 2.1, "idle": 0.4} adds up to the
    time between, with what it counted meanwhile.
    """

    worker: str
    seconds: dict[str, float]
    counts: dict[str, float] = field(default_factory=dict)
    laps: list[tuple[str, float]] = field(default_factory=list)  # the same in order, where it is not too long
    # bytes: of its process, "rss" now and "peak", and of what it holds, by name
    memory: dict[str, int] = field(default_factory=dict)
    until: float = 0.0  # when it said so, by its own clock: seconds since the epoch


@dataclass(slots=True)
class Advised(Event):
    """Who waits for whom, and what would end it; `gain` is the speed of the loop then by its speed now."""

    step: int
    message: str
    gain: float


@dataclass(slots=True)
class Evaluated(Event):
    step: int
    version: int
    profile: str
    score: float
    low: float
    high: float
    n: int
    request: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    of: dict[str, float] = field(default_factory=dict)  # the score by source, where there are several
    reward_min: float | None = None  # of its rewards: the score is a share where all of them lie in [0, 1]
    reward_max: float | None = None
    draws: int = 1  # of each task
    interval: str = ""  # how low and high were made; "" in older journals
    metrics: dict[str, list[float]] = field(default_factory=dict)  # {"pass@4": [value, low, high]}, above one draw


@dataclass(slots=True)
class Checkpointing(Event):
    """What happened before this line is in the checkpoint of `step`, should it be completed."""

    step: int


@dataclass(slots=True)
class Checkpointed(Event):
    step: int
    version: int
    path: str
    seconds: float


@dataclass(slots=True)
class Generating(Event):
    """A heartbeat of the engine while it works: what the progress line shows between steps."""

    running: int
    waiting: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class Evaluating(Event):
    """An evaluation on its way: `done` of the `total` answers to one set are scored. For the progress line."""

    step: int
    profile: str
    done: int
    total: int


@dataclass(slots=True)
class Speculated(Event):
    """What guesses ahead brought since the last such event: `accepted` of the `proposed`
    tokens stayed, in so many rounds of a request.
    """

    rounds: int
    proposed: int
    accepted: int


@dataclass(slots=True)
class Warned(Event):
    """Something a person should know; printed once and kept."""

    message: str


@dataclass(slots=True)
class Stalled(Event):
    """A wait passed its deadline. Who keeps stacks writes them while it is told, and says where."""

    message: str
    stacks: str = ""


@dataclass(slots=True)
class Broke(Event):
    """The run ends here, before its last step, and this is why; the same command goes on.
    What is killed from outside tells nothing.
    """

    message: str


@dataclass(slots=True)
class RunEnded(Event):
    step: int
    version: int
    reason: str
    seconds: float


_subscribers: list[tuple[Callable[[Event], None], tuple[type[Event], ...]]] = []


def emit(event: Event) -> None:
    """Hand an event to every reader of its kind, in the order in which they subscribed."""
    for reader, kinds in tuple(_subscribers):
        if not kinds or isinstance(event, kinds):
            reader(event)


def warn(told: str) -> None:
    emit(Warned(told))


def warn_aloud(told: str) -> None:
    """On stderr, too: for a reader in which a person would have seen it."""
    with suppress(Exception):  # the terminal may be gone
        print(f"warning: {visible_text(told)}", file=sys.stderr, flush=True)
    warn(told)


def drop_on_failure(name: str, call: Callable[..., None], *, tell: Callable[[str], None] = warn) -> Callable[..., None]:
    """A reader, or the writer of a sink, that a run can do without: the first time it fails
    that is told, and it is left out from there on.

    The journal and the rollouts are none: a resumed run depends on them. Nor is what steers the loop.
    """
    works = True

    def call_if_working(*args: Any) -> None:
        nonlocal works
        if not works:
            return
        try:
            call(*args)
        except Exception as error:  # a terminal, a disk, a package of somebody else's
            works = False
            tell(f"{name} is left out from here on, and the run goes on: {type(error).__name__}: {error}")

    return call_if_working


def stalled_error(message: str, error: type[StalledError] = StalledError) -> StalledError:
    """The error of a wait that passed its deadline, after everyone has heard of it. Call it
    where the wait ends, before anything is unwound.
    """
    event = Stalled(message)
    emit(event)
    return error(f"{message}; the stacks of all processes are in {event.stacks}" if event.stacks else message)


def subscribe(reader: Callable[[Event], None], *kinds: type[Event]) -> Callable[[], None]:
    """Add a reader of these kinds, of all without any; call the result to remove it. What it raises ends the run,
    unless `drop_on_failure` wraps it.
    """
    entry = (reader, kinds)
    _subscribers.append(entry)
    return lambda: _subscribers.remove(entry) if entry in _subscribers else None
