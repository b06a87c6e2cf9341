"""One run folder as the page sees it: its journal folded into columns while it grows, and what else was said.

The rows are those of the live run, made by the same StepMetrics; findings are those
of `rondel diagnose`, by the same rules. A journal that takes longer to read is first shown by a sample
of its steps (sample.py), which the whole then replaces.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rondel.core.errors import CheckpointError, UserError
from rondel.dashboard.columns import MetricColumns, MetricRow
from rondel.dashboard.sample import READ, read_sampled_columns
from rondel.dashboard.tail import FileTail, kind_of
from rondel.runtime.journal.log import FILE, parse_event, read_recipe
from rondel.runtime.telemetry.accounts import CONTROLLER
from rondel.runtime.telemetry.diagnose.finding import Finding
from rondel.runtime.telemetry.diagnose.story import EVALUATED, RECENT, Step, Story, event_of, is_locked
from rondel.runtime.telemetry.metrics import StepMetrics
from rondel.runtime.telemetry.scores import is_share, within_unit

LONG = 8 << 20  # bytes from which a journal is sampled first
NEWEST = 6000  # lines that are kept as they are, for the timeline
KEPT = 1000  # warnings
SPARE = 20  # times as long as the rules took they are not asked again, for a run of many steps
LOOK = 5.0  # seconds between two looks whether anybody trains in the folder


@dataclass
class ColumnStory(Story):
    """A Story whose curves come from columns."""

    columns: MetricColumns | None = None
    warm: int = 0

    def series(self, name: str) -> list[tuple[int, float]]:
        assert self.columns is not None
        return self.columns.series(name, self.warm + 1)


class DashboardRun:
    """`poll_journal()` reads on and says whether anything is new; everything else answers from
    what was read. Safe from several threads. `rules` are those of `diagnose`.
    """

    def __init__(self, folder: str | Path, rules: Callable[[Story], list[Finding]]) -> None:
        self.folder, self.rules = Path(folder), rules
        if not self.folder.is_dir():
            raise UserError(f"no run folder at {folder}; `rondel train RUN.toml` makes one (key run.folder)")
        self.lock = threading.RLock()
        self.tail = FileTail(self.folder / FILE)
        self.changes = 0
        self._reset_state()
        # of what, not again before, which
        self._found: tuple[tuple[Any, ...], float, list[dict[str, Any]]] = ((), 0.0, [])
        self._alive: tuple[float, bool] = (-LOOK, False)

    def _reset_state(self) -> None:
        self.story = Story(self.folder, {})
        self._load_recipe()
        self.columns = MetricColumns()
        self.sampled: MetricColumns | None = None
        self.versions: list[int] = []
        self.notes: list[str] = []
        self.newest: deque[bytes] = deque(maxlen=NEWEST)
        self.counts: deque[dict[str, float]] = deque(maxlen=RECENT)
        self.events, self.damaged, self.time, self.last, self.began = 0, 0, 0.0, "", 0.0
        self._counts: dict[str, float] = {}
        self._metrics = StepMetrics(self._add_row)

    def _load_recipe(self) -> None:
        self.story.job = _read_job(self.folder)
        self.warm = self.story.recipe_value("loop.warmup.steps", 0)

    # -- reading ---------------------------------------------------------------------------------

    def poll_journal(self) -> bool:
        """One stretch of the journal."""
        with self.lock:
            if fresh := self.tail.was_replaced():
                self._reset_state()
            if self.tail.at == 0 and self.tail.size > LONG and self.sampled is None:
                self.sampled = read_sampled_columns(self.tail.path)
                self.changes += 1
                return True
            lines = self.tail.read_lines()
            for line in lines:
                self._read_event(line)
            if self.sampled is not None and not self.tail.unread_bytes:
                self.sampled, fresh = None, True
            self.changes += bool(lines) or fresh
            return bool(lines) or fresh

    def _read_event(self, line: bytes) -> None:
        self.events += 1
        self.newest.append(line)
        kind = kind_of(line)
        if kind == "Admitted":  # half of all lines, and in none of the numbers
            return
        try:
            told = parse_event(line.decode("utf-8", "replace"))
            self._apply_event(kind, told)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self.damaged += 1

    def _apply_event(self, kind: str, told: dict[str, Any]) -> None:
        self.time, self.last = told["t"], kind
        self.began = self.began or told["t"]
        story = self.story
        if kind in READ:
            self._metrics.on_event(event_of(told))
        match kind:
            case "RunStarted":
                story.facts, story.lives, story.broke, story.ended = told["facts"], story.lives + 1, "", None
                self._load_recipe()  # it may be younger than this page
            case "WorkerTime":
                for name, n in told["counts"].items():
                    self._counts[name] = self._counts.get(name, 0) + n
            case "StepDone":
                story.ledger = told["ledger"]
                self.versions.append(told["version"])
                self.notes.append(told["note"])
                self.counts.append(self._counts)
                self._counts = {}
            case "Evaluated":
                story.evals = [e for e in story.evals if (e["step"], e["profile"]) != (told["step"], told["profile"])]
                story.evals.append({k: told[k] for k in EVALUATED if k in told})
            case "Resumed":
                self._back_to(told["step"])
            case "Warned" if len(story.said) < KEPT:
                story.said.append((self.step, told["message"]))
            case "Stalled":
                story.stalls.append((self.step, told))
            case "Checkpointed":
                story.saved.append(told["step"])
            case "Broke":
                story.broke = told["message"]
            case "RunEnded":
                story.ended = told

    def _add_row(self, step: int, row: dict[str, float]) -> None:
        self.columns.add_row(step, row)
        del self.versions[len(self.columns) - 1 :], self.notes[len(self.columns) - 1 :]

    def _back_to(self, step: int) -> None:
        """What follows the checkpoint will be told again."""
        self.story.resumes.append(step)
        self.columns.back_to(step)
        del self.versions[len(self.columns) :], self.notes[len(self.columns) :]
        self.story.evals = [e for e in self.story.evals if e["step"] <= step]
        self.story.saved = [s for s in self.story.saved if s <= step]
        self._counts = {}

    # -- what the page asks ----------------------------------------------------------------------

    @property
    def visible_columns(self) -> MetricColumns:
        return self.sampled if self.sampled is not None else self.columns

    @property
    def step(self) -> int:
        return self.visible_columns.steps[-1] if len(self.visible_columns) else 0

    @property
    def scores_are_shares(self) -> bool:
        """Whether a score of this run is a share: no reward outside [0, 1] was seen."""
        with self.lock:
            low, high = (self.visible_columns.value_range(name) for name in ("score/reward_min", "score/reward_max"))
            return all(map(is_share, self.story.evals)) and within_unit([*low, *high])

    @property
    def read_share(self) -> float:
        return self.tail.at / self.tail.size if self.tail.size else 1.0

    @property
    def state(self) -> str:
        """What a person would say of it."""
        story = self.story
        if self.tail.unread or (self.tail.unread_bytes and self.sampled is not None):
            return "reading"
        if not self.events:
            return "nothing yet"
        if story.ended and self.last == "RunEnded":
            return "complete" if self.step >= self.planned_steps else "ended"
        if story.broke and self.last == "Broke":
            return "broke"
        return "running" if self._is_alive() else "stopped"

    def _is_alive(self) -> bool:
        looked, alive = self._alive
        if (now := time.monotonic()) - looked > LOOK:
            alive = is_locked(self.folder / ".lock")
            self._alive = now, alive
        return alive

    @property
    def planned_steps(self) -> int:
        return self.warm + self.story.recipe_value("loop.steps", 0)

    def snapshot_story(self) -> ColumnStory:
        """The story for the rules of `diagnose`."""
        with self.lock:
            s, state = self.story, self.state
            first = next((i for i, step in enumerate(self.columns.steps) if step > self.warm), len(self.columns))
            steps = [
                Step(self.columns.steps[i], self.versions[i], MetricRow(self.columns, i), self.notes[i])
                for i in range(first, len(self.columns))
            ]
            counts: dict[str, float] = {}
            for told in list(self.counts)[-min(RECENT, len(steps)) :] if steps else []:
                for name, n in told.items():
                    counts[name] = counts.get(name, 0) + n
            alive = state == "running"
            return ColumnStory(
                self.folder,
                s.job,
                s.facts,
                steps,
                min(self.warm, self.step),
                list(s.evals),
                list(s.said),
                list(s.stalls),
                s.broke if not alive else "",
                s.ended if not alive else None,
                s.lives,
                list(s.resumes),
                list(s.saved),
                s.ledger,
                self.time_accounts(steps[-RECENT:][0].number) if steps else {},
                counts,
                alive,
                columns=self.columns,
                warm=self.warm,
            )

    def ranked_findings(self) -> list[dict[str, Any]]:
        """Ranked; made again when there is a new step or the run has changed its state."""
        with self.lock:
            now = (self.state, self.step, len(self.story.said), self.story.lives)
            if self.state == "reading":  # of half a journal a rule would say that the run has died
                return []
            of, until, _ = self._found
            began = time.monotonic()
            if of[:1] != now[:1] or (of != now and began >= until):
                found = [asdict(f) for f in self.rules(self.snapshot_story())] if self.events else []
                ended = time.monotonic()
                self._found = now, ended + SPARE * (ended - began), found
            return self._found[2]

    def time_accounts(self, first: int, last: int | None = None) -> dict[str, dict[str, float]]:
        """{"controller": {"wait": 61.0, ...}, "engine-0": {...}}: seconds in these steps."""
        found: dict[str, dict[str, float]] = {}
        for name in self.visible_columns.values:
            if name.startswith("time/") and name != "time/step":
                worker, _, kind = name[5:].rpartition("/")
                if (seconds := self.visible_columns.sum_between(name, first, last)) > 0:
                    found.setdefault(worker or CONTROLLER, {})[kind] = seconds
        return found

    def newest_events(self, steps: int) -> list[dict[str, Any]]:
        """The events of the last few steps, as they were written."""
        with self.lock:
            lines = list(self.newest)
        marks = [i for i, line in enumerate(lines) if kind_of(line) == "StepDone"]
        first = marks[-steps - 1] + 1 if len(marks) > steps else 0
        out = []
        for line in lines[first:]:
            try:
                out.append(parse_event(line.decode("utf-8", "replace")))
            except ValueError:
                continue
        return out


def _read_job(folder: Path) -> dict[str, Any]:
    """The recipe, if it can be read: the page shows the rest without it."""
    try:
        return read_recipe(folder)
    except CheckpointError:
        return {}
