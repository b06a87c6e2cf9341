"""Who waits for whom, and what would end it.  R seconds of rollouts and T of training and sync a step:

    side by side (split, S >= 1)   step = max(R, T)     at S = 0, or on one device   step = R + T

The trainer waits: step = R, so n engines more make it max(R·e/(e + n), T). The engines wait: step = T, and with
one rank more max(R, T·r/(r + 1)). One of two S = 0 devices always waits; with S = 1
the step is max(R, T) instead of R + T.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rondel.core.events import Advised, Event, StepDone, WorkerTime, emit

MUCH = 0.3  # of the step that somebody waits before it is said
GAIN = 1.1  # of the loop that is worth a change


@dataclass(frozen=True)
class RuntimeAdvice:
    message: str
    gain: float


@dataclass(frozen=True)
class PlacementFacts:
    """What of the recipe decides who can work beside whom."""

    split: bool
    engines: int
    ranks: int
    staleness: int

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> PlacementFacts:
        place, loop = job.get("place", {}), job.get("loop", {})
        return cls(
            place.get("kind") == "split", place.get("engines", 1), place.get("ranks", 1), loop.get("max_staleness", 0)
        )


def advise_runtime(phases: Mapping[str, float], idle: float, place: PlacementFacts) -> RuntimeAdvice | None:
    """`phases`: seconds of the learner by name; `idle`: share of their time in which engines
    had nothing to do. None where all is well.
    """
    step, wait = sum(phases.values()), phases.get("wait", 0.0)
    if step <= 0 or not place.split:
        return None
    share, training = wait / step, step - wait
    if place.staleness == 0:
        gain = step / max(wait, training) if training > 0 else 1.0
        return _advice_if_faster(
            gain,
            f"the trainer waits {share:.0%} of the step and the engines the rest of it: loop.max_staleness = 1 (with "
            f"algo.correction.kind = "
            "'importance') lets both work at once",
        )
    if share >= MUCH:
        engines, gain = place.engines, 1.0
        for more in range(1, place.engines + 1):  # at most twice as many, and none that no longer helps
            engines, gain = place.engines + more, step / max(step * place.engines / (place.engines + more), training)
            if step * place.engines / engines <= training:
                break
        return _advice_if_faster(
            gain,
            f"the trainer waits {share:.0%} of the step: place.engines = {engines}, or a larger engine.max_running if "
            f"its batch is full",
        )
    if idle >= MUCH:
        return _advice_if_faster(
            1 / max(1 - idle, place.ranks / (place.ranks + 1)),
            f"the engines have nothing to do {idle:.0%} of the time, the trainer sets the pace: place.ranks = "
            f"{place.ranks + 1}; or fewer place.engines, "
            "and where it is the admission that waits a larger loop.max_staleness",
        )
    return None


def _advice_if_faster(gain: float, message: str) -> RuntimeAdvice | None:
    return RuntimeAdvice(f"{message} (about {gain:.1f}x as fast)", gain) if gain >= GAIN else None


class Advisor:
    """A reader of events that says it while the run goes on, at most once in EVERY steps:
    `subscribe(Advisor(Place.of(job.tree())).read)`.
    """

    EVERY = 20

    def __init__(self, place: PlacementFacts, after: int = 0) -> None:
        self.place, self.after = place, after
        self.steps = 0
        self.phases: defaultdict[str, float] = defaultdict(float)
        self.engines: defaultdict[str, float] = defaultdict(float)

    def on_event(self, event: Event) -> None:
        if isinstance(event, WorkerTime) and event.worker.startswith("engine"):
            for kind, seconds in event.seconds.items():
                self.engines[kind] += seconds
        elif isinstance(event, StepDone) and event.step > self.after:
            for name, seconds in event.seconds.items():
                if name not in ("step", "milestone"):
                    self.phases[name] += seconds
            self.steps += 1
            if self.steps == self.EVERY:
                told = advise_runtime(self.phases, idle_share(self.engines), self.place)
                self.steps = 0
                self.phases.clear()
                self.engines.clear()
                if told:
                    emit(Advised(event.step, told.message, told.gain))


def idle_share(engines: Mapping[str, float]) -> float:
    """0 where no engine has told."""
    total = sum(engines.values())
    return engines.get("idle", 0.0) / total if total else 0.0
