"""What a run's own timers say that things cost: the simulator's world from journals instead of the planner's tables.

engine      seconds of generation = a · steps + b · requests decoded + c · prompt tokens read, by
            the account that it tells at every version; where noise leaves neither a nor b, c = 0
trainer     seconds of a step = fixed + d · packed tokens;  host: what the controller does between two steps
answer      seconds of the controller an answer: what a synchronous step waits beyond what its engines generate
sync, pause as they were on average.  Averages and not medians: they add up to the time that the run took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rondel.core.errors import DataError
from rondel.runtime.journal.log import read
from rondel.simulate.pool import QUICKEST
from rondel.simulate.run import SimulatedWorld

FIRST = 2  # steps of a run that are not counted: everything is touched for the first time


@dataclass(frozen=True)
class Costs:
    """Seconds, as `SimulatedWorld` has them; `step` and `request` are the two parts of a beat, `prompt`
    the packed tokens a group beside its answers.
    """

    step: float
    request: float
    prefill: float
    train: float
    fixed: float
    answer: float
    sync: float
    pause: float
    prompt: float

    def with_costs(self, world: SimulatedWorld) -> SimulatedWorld:
        """The same work at these costs."""
        return replace(
            world,
            beat=[self.step + self.request * n for n in range(world.places + 1)],
            prefill=self.prefill,
            train=self.train,
            fixed=self.fixed,
            answer=self.answer,
            sync=self.sync,
            pause=self.pause,
            prompt=self.prompt,
        )


def costs_of(folders: list[str] | list[Path], *, first: int = FIRST) -> Costs:
    """Of one run, or of several together: batches of different sizes tell a step's cost from a request's."""
    seen = [Timers(folder, first) for folder in folders]
    generated, trained = (
        np.array([row for run in seen for row in getattr(run, name)]) for name in ("generated", "trained")
    )
    step, request, prefill = fit_nonnegative(generated[:, 1:], generated[:, 0])
    if step + request < QUICKEST:  # few steps and much noise: as if reading prompts took all the time, and writing none
        step, request, prefill = *fit_nonnegative(generated[:, 1:3], generated[:, 0]), 0.0
    fixed, train = fit_nonnegative(trained[:, 1:], trained[:, 0])

    def mean_seconds(name: str) -> float:
        values = [value for run in seen for value in getattr(run, name)]
        return fmean(values) if values else 0.0

    return Costs(
        step=step,
        request=request,
        prefill=prefill,
        train=train,
        fixed=fixed + mean_seconds("host"),
        answer=max(0.0, mean_seconds("answers")),
        sync=mean_seconds("syncs"),
        pause=mean_seconds("pauses"),
        prompt=mean_seconds("prompts"),
    )


class Timers:
    """The rows of one journal, behind its first steps.

    generated  seconds, engine steps, requests, prompt tokens: a row a step of the run, of all engines
    trained    seconds, 1, packed tokens
    rates      samples a second of the run itself, for who wants to compare
    """

    def __init__(self, folder: str | Path, first: int = FIRST) -> None:
        self.generated: list[tuple[float, ...]] = []
        self.trained: list[tuple[float, ...]] = []
        self.host: list[float] = []
        self.answers: list[float] = []
        self.syncs: list[float] = []
        self.pauses: list[float] = []
        self.prompts: list[float] = []
        self.samples, self.seconds = 0, 0.0
        lengths: dict[int, list[int]] = {}
        told: list[dict[str, Any]] = []
        for e in read(folder):
            if e["kind"] == "GroupFinished":
                lengths[e["number"]] = e["lengths"]
            told.append(e)
            if e["kind"] == "StepDone":
                if (first := first - 1) < 0 and e["metrics"].get("train/packed_tokens"):
                    self._add_step({event["kind"]: event for event in told}, told, lengths)
                told = []
        if not self.trained or not self.generated:
            raise DataError(
                f"the journal of {folder} has too few steps to say what they cost: {FIRST + 1} at least, of engines of "
                f"ours"
            )

    def _add_step(self, last: dict[str, Any], told: list[dict[str, Any]], lengths: dict[int, list[int]]) -> None:
        done, taken = last["StepDone"], last["GroupsTaken"]
        took, packed = done["seconds"], done["metrics"]["train/packed_tokens"]
        written = [n for number in taken["numbers"] for n in lengths.get(number, [])]
        self.samples += len(written)
        self.seconds += took["step"]
        self.trained.append((took["train"], 1.0, packed))
        self.prompts.append(max(0.0, packed - sum(written)) / len(taken["numbers"]))
        self.syncs.append(took["sync"])
        # of an update beside the next step, which may end in the row before or after
        self.pauses += [event["paused"] for event in told if event["kind"] == "Synced"]
        self.host.append(took.get("prepare", 0.0) + took.get("hand_over", 0.0) + took.get("milestone", 0.0))
        accounts = [
            e
            for e in told
            if e["kind"] == "WorkerTime" and e["worker"].startswith("engine") and e["counts"].get("steps")
        ]
        if not accounts:
            return
        counts = [sum(e["counts"].get(name, 0) for e in accounts) for name in ("steps", "requests", "read")]
        generate = sum(e["seconds"].get("generate", 0.0) for e in accounts)
        self.generated.append((generate, *counts))
        if not taken["limit"]:
            self.answers.append(
                (took["wait"] - max(e["seconds"].get("generate", 0.0) for e in accounts)) / max(1, len(written))
            )


def fit_nonnegative(rows: Any, seconds: Any) -> list[float]:
    """argmin |rows x - seconds| over x >= 0: the best of all choices of what is not 0,
    for there are three columns at most.
    """
    best, found = np.inf, np.zeros(rows.shape[1])
    for size in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), size)):
            x = np.zeros(rows.shape[1])
            x[chosen] = np.linalg.lstsq(rows[:, chosen], seconds, rcond=None)[0]
            error = float(((rows @ x - seconds) ** 2).sum())
            if (x >= 0).all() and error < best * (1 - 1e-9):
                best, found = error, x
    return [float(v) for v in found]
