"""A run folder as rules read it: the journal folded into one row of metrics a step, and what else was said.

The rows are made by the `StepMetrics` of a live run from the same events, so a rule
and a dashboard see the same numbers.
"""

from __future__ import annotations

import fcntl
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rondel.core import events as words
from rondel.runtime.journal.log import drop_repeated_events, read_history, read_recipe
from rondel.runtime.telemetry.accounts import seconds_of
from rondel.runtime.telemetry.metrics import StepMetrics
from rondel.runtime.telemetry.scores import is_share, within_unit

RECENT = 8  # steps that are "now"
LEAST = 3  # steps before which nothing is said of a trend
LINES = 40  # of each log that are its last words
EVALUATED = ("step", "score", "low", "high", "n", "profile", "reward_min", "reward_max", "interval")
ROWS = ("GroupFinished", "Synced", "Resident", "RewardCounts", "Speculated", "WorkerTime", "StepDone", "Resumed")


@dataclass
class Step:
    """One step of the RL phase: its row, and why it was not taken."""

    number: int
    version: int
    row: Mapping[str, float]
    note: str = ""


@dataclass
class Story:
    folder: Path
    job: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)  # of the RL phase
    shown: int = 0  # steps of the supervised phase
    evals: list[dict[str, Any]] = field(default_factory=list)
    said: list[tuple[int, str]] = field(default_factory=list)  # (step, warning)
    stalls: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    broke: str = ""  # why the last life of the run ended
    ended: dict[str, Any] | None = None
    lives: int = 0
    resumes: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)  # steps with a checkpoint
    ledger: dict[str, int] = field(default_factory=dict)
    accounts: dict[str, dict[str, float]] = field(default_factory=dict)  # of the last RECENT steps
    counts: dict[str, float] = field(default_factory=dict)  # of the engines in them
    alive: bool = False

    # -- what rules ask --------------------------------------------------------------------------

    def recipe_value(self, dotted: str, default: Any = None) -> Any:
        """Of the recipe: `story.recipe_value("loop.max_staleness")`."""
        node: Any = self.job
        for name in dotted.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return default if node is None else node

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every RL step that has it."""
        return [(s.number, s.row[name]) for s in self.steps if name in s.row]

    def recent_values(self, name: str, n: int = RECENT) -> list[float]:
        """The last n values that are numbers; nothing where there are fewer than LEAST."""
        values = [v for _, v in self.series(name)[-n:] if math.isfinite(v)]
        return values if len(values) >= LEAST else []

    def recent_mean(self, name: str, n: int = RECENT) -> float | None:
        return statistics.fmean(values) if (values := self.recent_values(name, n)) else None

    def first_mean(self, name: str, n: int = LEAST) -> float | None:
        """The mean of the first steps."""
        values = [v for _, v in self.series(name)[:n] if math.isfinite(v)]
        return statistics.fmean(values) if values else None

    @property
    def scores_are_shares(self) -> bool:
        """Whether no reward outside [0, 1] was seen, so that a score is a share."""
        seen = [v for name in ("score/reward_min", "score/reward_max") for _, v in self.series(name)]
        return all(map(is_share, self.evals)) and within_unit(seen)

    @property
    def recent_span(self) -> str:
        """Which steps `recent` means: "steps 12 to 19"."""
        numbers = [s.number for s in self.steps[-RECENT:]]
        if len(numbers) < 2:
            return f"step {numbers[0]}" if numbers else "no step"
        return f"steps {numbers[0]} to {numbers[-1]}"

    @property
    def step(self) -> int:
        return self.steps[-1].number if self.steps else self.shown

    @property
    def other_policies(self) -> list[str]:
        """Policies with weights of their own that are trained beside the main one."""
        return [name for name, told in self.recipe_value("policies", {}).items() if not told.get("frozen")]

    def for_policy(self, policy: str) -> Story:
        """The same run with the rows of such a policy for those of the main one; a step
        that was not taken is told once, there.
        """
        rows = [
            {name: value for name, value in step.row.items() if not name.startswith("train/")} for step in self.steps
        ]
        for row in rows:
            own = {
                f"train/{name.removeprefix(f'{policy}/')}": value
                for name, value in row.items()
                if name.startswith(f"{policy}/")
            }
            row |= own | {"score/reward_mean": row.get(f"{policy}/reward_mean", math.nan)}
        return replace(
            self, steps=[Step(step.number, step.version, row) for step, row in zip(self.steps, rows, strict=True)]
        )

    @property
    def compares_answers(self) -> bool:
        """Whether answers are compared within their group: then a unanimous one teaches nothing."""
        elsewhere = {"values", "teacher_logprobs"} & set(self.facts.get("needs", ()))
        return not elsewhere and self.recipe_value("algo.group_size", 8) > 1

    def worker_logs(self) -> dict[str, list[str]]:
        """The last words of every worker."""
        found = {}
        for path in sorted((self.folder / "logs").glob("*.log")):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 16384))
                found[path.name] = file.read().decode(errors="replace").splitlines()[-LINES:]
        return found


# -- from the folder -------------------------------------------------------------------------------


def read_story(folder: str | Path) -> Story:
    """Of a run that ended, died, or still goes on."""
    folder = Path(folder)
    raw = read_history(folder)
    story = Story(folder, read_recipe(folder), alive=is_locked(folder / ".lock"))
    story.lives = sum(e["kind"] == "RunStarted" for e in raw)
    story.resumes = [e["step"] for e in raw if e["kind"] == "Resumed"]
    if raw and not story.alive:
        story.broke = raw[-1]["message"] if raw[-1]["kind"] == "Broke" else ""
        story.ended = raw[-1] if raw[-1]["kind"] == "RunEnded" else None
    _fold_events(story, drop_repeated_events(raw))
    return story


def is_locked(lock: Path) -> bool:
    """Whether a process trains in this folder, which may be read-only for this one."""
    if not lock.is_file():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _fold_events(story: Story, events: list[dict[str, Any]]) -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    metrics = StepMetrics(lambda step, row: rows.append((step, row)))
    warm, step, begun = story.recipe_value("loop.warmup.steps", 0), 0, []
    for at, event in enumerate(events):
        kind = event["kind"]
        if kind in ROWS or kind == "GroupsTaken":
            metrics.on_event(event_of(event))
        match kind:
            case "RunStarted":
                story.facts = event["facts"]
            case "StepDone":
                step, story.ledger = event["step"], event["ledger"]
                row = rows.pop()[1]
                if step <= warm:
                    story.shown = step
                else:
                    story.steps.append(Step(step, event["version"], row, event["note"]))
                    begun.append(at)
            case "Evaluated":
                story.evals.append({k: event[k] for k in EVALUATED if k in event})
            case "Warned":
                story.said.append((step, event["message"]))
            case "Stalled":
                story.stalls.append((step, event))
            case "Checkpointed":
                story.saved.append(event["step"])
    now = events[begun[-RECENT - 1] + 1 if len(begun) > RECENT else begun[0] if begun else len(events) :]
    story.accounts = seconds_of(now)
    for event in now:
        if event["kind"] == "WorkerTime":
            for name, n in event["counts"].items():
                story.counts[name] = story.counts.get(name, 0) + n


def event_of(told: dict[str, Any]) -> words.Event:
    """The event again; of consumed groups the journal keeps when they were born."""
    if told["kind"] == "GroupsTaken":
        groups: Any = [SimpleNamespace(born=born, policy_samples=[], supervised=False) for born in told["born"]]
        return words.GroupsTaken(told["step"], told["version"], groups, told.get("limit", 0))
    kind = getattr(words, told["kind"])
    return kind(**{f.name: told[f.name] for f in fields(kind) if f.name in told})


def flatten_tree(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loop": {"steps": 5}} -> {"loop.steps": 5}"""
    out: dict[str, Any] = {}
    for key, value in node.items():
        out |= flatten_tree(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def differing(old: dict[str, Any], new: dict[str, Any], skip: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Of two trees, the leaves that differ: {"loop.seed": (0, 1)}."""
    a, b = flatten_tree(old), flatten_tree(new)
    names = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k) and not k.startswith(tuple(skip))]
    return {name: (a.get(name), b.get(name)) for name in names}
