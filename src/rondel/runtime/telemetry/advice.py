"""Advice while a run goes on: who waits for whom by the seconds that were measured, and what would end it.

`planner.overlap` has the formulas. Where the trainer waits, the rollouts take the whole step; where the engines do,
training takes it; at S = 0 the trainer's wait are the rollouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rondel.core.events import Advised, Event, StepDone, WorkerTime, emit
from rondel.planner.overlap import StepTimes, stages_overlap

MUCH = 0.3  # of the step that somebody waits before it is said
GAIN = 1.1  # of the loop that is worth a change


@dataclass(frozen=True)
class RuntimeAdvice:
    """A change of the recipe, how many times as fast the loop would be, and the side that waits now."""

    message: str
    gain: float
    waiting: Literal["trainer", "engine"]


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
        engines = place.get("engines", 1)
        return cls(
            place.get("kind") == "split",
            engines if isinstance(engines, int) else engines.get("count", 1),
            place.get("ranks", 1),
            loop.get("max_staleness", 0),
        )


def advise_runtime(phases: Mapping[str, float], idle: float, place: PlacementFacts) -> RuntimeAdvice | None:
    """`phases`: seconds of the learner by name; `idle`: share of their time in which engines
    had nothing to do. None where all is well.
    """
    step, wait = sum(phases.values()), phases.get("wait", 0.0)
    if step <= 0 or not place.split:
        return None
    share, training = wait / step, step - wait
    if not stages_overlap(place.split, place.staleness):
        now = StepTimes(wait, training, overlap=False)
        return _advice_if_faster(
            now,
            now.overlapped(),
            f"the trainer waits {share:.0%} of the step and the engines the rest of it: loop.max_staleness = 1 (with "
            f"algo.correction.kind = "
            "'importance') lets both work at once",
        )
    if share >= MUCH:
        now = StepTimes(step, training, overlap=True)
        engines = now.matching_engines(place.engines, 2 * place.engines)
        return _advice_if_faster(
            now,
            now.scaled(engines=engines / place.engines),
            f"the trainer waits {share:.0%} of the step: place.engines = {engines}, or a larger engine.max_running if "
            f"its batch is full",
        )
    if idle >= MUCH:
        now = StepTimes(step * (1 - idle), step, overlap=True)
        return _advice_if_faster(
            now,
            now.scaled(ranks=(place.ranks + 1) / place.ranks),
            f"the engines have nothing to do {idle:.0%} of the time, the trainer sets the pace: place.ranks = "
            f"{place.ranks + 1}; or fewer place.engines, "
            "and where it is the admission that waits a larger loop.max_staleness",
        )
    return None


def _advice_if_faster(now: StepTimes, changed: StepTimes, message: str) -> RuntimeAdvice | None:
    gain = changed.speedup_over(now)
    return RuntimeAdvice(f"{message} (about {gain:.1f}x as fast)", gain, now.waiting) if gain >= GAIN else None


class Advisor:
    """A reader of events that says it while the run goes on, at most once in EVERY steps:
    `subscribe(Advisor(PlacementFacts.from_job(job.to_dict())).on_event)`.
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
                told = advise_runtime(self.phases, engine_idle_share(self.engines), self.place)
                self.steps = 0
                self.phases.clear()
                self.engines.clear()
                if told:
                    emit(Advised(event.step, told.message, told.gain))


def engine_idle_share(engines: Mapping[str, float]) -> float:
    """The idle share of the engines' time accounts; 0 without any."""
    total = sum(engines.values())
    return engines.get("idle", 0.0) / total if total else 0.0
