"""The journal: what crossed a stage, one JSON object a line, append-only. Recovery,
metrics, run card and replay read it.

    {"n": 17, "t": 1795264617.1, "kind": "StepDone", "step": 3, "version": 3, ...}

`t` is the time of day by a clock that is never set while the run lives: the difference
of two lines of one life is a duration.

A run that crashed and resumed has told part of its story twice. `history` gives every line; `read` gives what counts.
A number that JSON cannot say is written {"$float": "nan"}, so the file stays JSON
and nothing is lost. `Generating`, the heartbeat, and `Evaluating` are for the eyes only and not
written; the groups of `GroupsTaken` go to
the rollout store, their numbers stay.
"""

from __future__ import annotations

import errno
import math
import os
import re
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rondel.core.clocks import now
from rondel.core.errors import CheckpointError, UserError
from rondel.core.events import Checkpointed, Evaluating, Event, Generating, GroupsTaken, RunEnded, StepDone
from rondel.system.files import guard_write, make_folder, sync_folder
from rondel.text.unicode import read_exact_json, write_json

FILE = "journal.jsonl"
MEND = (
    "Put a copy of it back, or move it away: the run then goes on from its last checkpoint, without what it told before"
)
MILESTONES = (StepDone, Checkpointed, RunEnded)  # on disk before the run goes on, with durability = "disk"
LASTING = {"RunStarted", "Resumed", "Warned", "Stalled", "Broke", "Advised"}  # true whatever is repeated later


class Journal:
    """The writer: `subscribe(Journal("runs/a").write)`. Every line survives the process,
    those up to a checkpoint the machine.

    folder      the run folder; made when missing
    durability  "process" hands each line to the operating system and calls fsync at a
                checkpoint, "disk" also at each step
    """

    def __init__(self, folder: str | Path, durability: Literal["process", "disk"] = "process") -> None:
        self.path, self.durability = Path(folder) / FILE, durability
        self._lock = threading.Lock()
        make_folder(self.path.parent)
        with guard_write(self.path, doing="opening"):
            self._next, self._length = _complete_lines(self.path)
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(self._length)  # a crash may have torn the last line
            sync_folder(self.path.parent)

    def write(self, event: Event) -> None:
        """One event, one line."""
        if isinstance(event, Generating | Evaluating):
            return
        with self._lock:
            line = (
                write_json(
                    {"n": self._next, "t": round(now(), 3), "kind": type(event).__name__, **_event_fields(event)}
                ).encode()
                + b"\n"
            )
            with guard_write(self.path, len(line)):
                self._append_line(line)
                if isinstance(event, Checkpointed) or (self.durability == "disk" and isinstance(event, MILESTONES)):
                    os.fsync(self._file.fileno())
            self._next += 1

    def _append_line(self, line: bytes) -> None:
        """The whole line, or the file as it was: a full disk takes a part of it."""
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            self._file.truncate(self._length)
            raise
        self._length += len(line)

    def close(self) -> None:
        self._file.close()


def _event_fields(event: Event) -> dict[str, Any]:
    if isinstance(event, GroupsTaken):
        numbers, births = [g.id for g in event.groups], [g.born for g in event.groups]
        return {"step": event.step, "version": event.version, "numbers": numbers, "born": births, "limit": event.limit}
    return {f.name: getattr(event, f.name) for f in fields(event)}


def _complete_lines(path: Path) -> tuple[int, int]:
    """The next sequence number, and how many bytes of the file are whole lines."""
    data = _read_regular_file(path) if path.exists() else b""
    end = data.rfind(b"\n") + 1
    for _ in range(2):  # a power loss may also leave one line of noise that ends in a newline
        if not end:
            return 0, 0
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            return parse_event(data[start:end].decode())["n"] + 1, end
        except ValueError:
            end = start
    raise CheckpointError(f"{path} ends in several lines that are not JSON: it was damaged or edited. {MEND}")


def _read_regular_file(path: Path) -> bytes:
    if not path.is_file():  # a pipe would be waited for
        raise OSError(errno.ENXIO, "not a file", str(path))
    return path.read_bytes()


def parse_event(line: str) -> dict[str, Any]:
    """The event that a line tells; ValueError for what is none, and for one whose fields have other types."""
    try:
        event = read_exact_json(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not (isinstance(event, dict) and {"n", "t", "kind"} <= event.keys()):
        raise ValueError("not an event: it needs n, t and kind")
    n, t, kind = event["n"], event["t"], event["kind"]
    if type(n) is not int or not isinstance(t, int | float) or not isinstance(kind, str):
        raise ValueError(f"n = {n!r:.40}, t = {t!r:.40}, kind = {kind!r:.40} are no number, time and name")
    for name, told in TOLD.get(kind, ()):
        if name not in event:
            if told.always:
                raise ValueError(f"a {kind} without {name}")
        elif not told.accepts_value(event[name]):
            raise ValueError(f"the {name} of a {kind} is {event[name]!r:.40}, and no {told.what}")
    return event


class FieldRule(NamedTuple):
    """What the line of an event has under a name: in any case or not; of which type;
    numbers or texts in it; and how that is called.
    """

    always: bool
    outer: tuple[type, ...]
    inner: tuple[type, ...]
    what: str

    def accepts_value(self, value: Any) -> bool:
        if not isinstance(value, self.outer):
            return False
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list) and self.inner else ()
        return not self.inner or all(isinstance(one, self.inner) for one in within)


PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "dict": (dict,),
    "list": (list,),
    "tuple": (list,),
}
INNER = re.compile(r"(?:dict\[str, |list\[)(int|float|str|dict)(?:\[.*\])?\]")


def _field_rule(field: Field[Any]) -> FieldRule:
    written, optional = str(field.type).removesuffix(" | None"), str(field.type).endswith(" | None")
    outer, inner = PLAIN.get(written.partition("[")[0], (object,)), INNER.fullmatch(written)
    always = field.default is MISSING and field.default_factory is MISSING
    return FieldRule(
        always, (*outer, type(None)) if optional else outer, PLAIN[inner[1]] if inner else (), str(field.type)
    )


TOLD: dict[str, tuple[tuple[str, FieldRule], ...]] = {  # kind of event -> what its line has
    kind.__name__: tuple((f.name, _field_rule(f)) for f in fields(kind))
    for kind in Event.__subclasses__()
    if kind is not GroupsTaken
} | {
    "GroupsTaken": tuple(
        (name, FieldRule(name != "limit", PLAIN[what], PLAIN["int"] if what == "list" else (), what))
        for name, what in {"step": "int", "version": "int", "numbers": "list", "born": "list", "limit": "int"}.items()
    )
}


# -- reading ---------------------------------------------------------------------------------------


def journal_of(folder: str | Path) -> Path:
    """The journal of a run folder; an error where it is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no run folder at {folder}; `rondel train RUN.toml` makes one (key run.folder)")
    if not (path := folder / FILE).exists():
        raise UserError(
            f"{folder} holds no {FILE}, so it is not a run folder; give the folder named by run.folder in the recipe"
        )
    return path


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Every event ever written, also those that a resume has repeated since. A torn last line is not an event."""
    path = journal_of(folder)
    with guard_write(path, doing="reading"):
        lines = _read_regular_file(path).decode("utf-8", "replace").split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(parse_event(line))
        except ValueError as error:
            if number < len(lines) - 1:
                raise CheckpointError(
                    f"{path} line {number} is not an event ({error}): the file was damaged or edited. {MEND}"
                ) from error
    return events


def read_recipe(folder: str | Path) -> dict[str, Any]:
    """The job.toml of a run as plain tables; {} where there is none."""
    path = Path(folder) / "job.toml"
    if not path.exists():
        return {}
    try:
        with guard_write(path, doing="reading"):
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
            if odd := next((name for name, node in tree.items() if not isinstance(node, dict)), None):
                raise ValueError(f"{odd} is no table")
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Put a copy of it back; the recipe that began the run says the same") from error
    return tree


def read(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The events that count, in order: the run as if it had never been interrupted."""
    yield from drop_repeated_events(read_history(folder))


def drop_repeated_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what a later `Resumed` repeats. Three rules:

    1. `Resumed(step=k)` goes back to the line of `Checkpointing(step=k)`; in older journals to that of
       `Checkpointed(step=k)` or, where the crash came before it, to the last event of a step <= k. What follows that
       line is void, except facts of steps <= k (`StepDone(k)` is written after its checkpoint) and what stays true:
       RunStarted, Resumed, Warned, Stalled, Broke, Advised.
       `Resumed(checkpoint="")` begins again from nothing.
    2. Numbers are given in order, so an `Admitted(m)` voids earlier events about groups numbered m or higher: while a
       checkpoint is being written, the rollouts go on.
    3. A group that was in flight at the checkpoint finishes twice: the later `GroupFinished` of a number counts.
    """
    told: list[dict[str, Any]] = []
    highest = -1
    for event in events:
        if event["kind"] == "Resumed":
            told = _events_before(told, event)
        elif event["kind"] == "Admitted":
            if event["number"] <= highest:
                told = [e for e in told if e.get("number", -1) < event["number"]]
            highest = event["number"]
        told.append(event)
    last = {e["number"]: at for at, e in enumerate(told) if e["kind"] == "GroupFinished"}
    return [e for at, e in enumerate(told) if e["kind"] != "GroupFinished" or last[e["number"]] == at]


def _events_before(told: list[dict[str, Any]], resumed: dict[str, Any]) -> list[dict[str, Any]]:
    step = resumed["step"]
    if not resumed["checkpoint"]:
        return [e for e in told if e["kind"] in LASTING]
    begun, saved = (
        [at for at, e in enumerate(told) if e["kind"] == kind and e["step"] == step]
        for kind in ("Checkpointing", "Checkpointed")
    )
    earlier = [at for at, e in enumerate(told) if e["kind"] not in LASTING and e.get("step", math.inf) <= step]
    cut = max(begun or saved or earlier, default=-1)
    return [
        e for at, e in enumerate(told) if e["kind"] in LASTING or e.get("step", step if at <= cut else math.inf) <= step
    ]
