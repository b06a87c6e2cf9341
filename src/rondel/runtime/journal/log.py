"""The journal: what crossed a stage, one JSON object a line, append-only. Recovery, metrics, run card and replay read it.

    {"n": 17, "t": 1795264617.1, "kind": "StepDone", "step": 3, "version": 3, ...}

A run that crashed and resumed has told part of its story twice. `history` gives every line; `read` gives what counts.
A number that JSON cannot say is written {"$float": "nan"}, so the file stays JSON and nothing is lost. `Generating`, the
heartbeat, is for the eyes only and not written; the groups of `GroupsTaken` go to the rollout store, their numbers stay.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from rondel.words.errors import CheckpointError, UserError, boundary
from rondel.words.events import Checkpointed, Event, Generating, GroupsTaken, RunEnded, StepDone

FILE = "journal.jsonl"
MILESTONES = (StepDone, Checkpointed, RunEnded)  # on disk before the run goes on, with durability = "disk"
LASTING = {"RunStarted", "Resumed", "Warned", "Stalled", "Broke", "Advised"}  # true whatever is repeated later


class Journal:
    """The writer: `subscribe(Journal("runs/a").write)`. Every line survives the process; with "disk", every step survives the machine.

    folder      the run folder; made when missing
    durability  "process" flushes each line to the operating system, "disk" also calls fsync at each milestone
    """

    def __init__(self, folder: str | Path, durability: Literal["process", "disk"] = "process") -> None:
        self.path, self.durability = Path(folder) / FILE, durability
        self._lock = threading.Lock()
        with boundary(CheckpointError, f"opening {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._next, length = _whole(self.path)
            self._file = self.path.open("ab")
            self._file.truncate(length)  # a crash may have torn the last line

    def write(self, event: Event) -> None:
        """One event, one line."""
        if isinstance(event, Generating):
            return
        with self._lock, boundary(CheckpointError, f"writing {self.path}"):
            line = encode({"n": self._next, "t": round(time.time(), 3), "kind": type(event).__name__, **_fields(event)})
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            self._next += 1
            if self.durability == "disk" and isinstance(event, MILESTONES):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _fields(event: Event) -> dict[str, Any]:
    if isinstance(event, GroupsTaken):
        numbers, births = [g.id for g in event.groups], [g.born for g in event.groups]
        return {"step": event.step, "version": event.version, "numbers": numbers, "born": births, "limit": event.limit}
    return {f.name: getattr(event, f.name) for f in fields(event)}


def _whole(path: Path) -> tuple[int, int]:
    """The next sequence number, and how many bytes of the file are whole lines."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    for _ in range(2):  # a power loss may also leave one line of noise that ends in a newline
        if not end:
            return 0, 0
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            return _event(data[start:end].decode())["n"] + 1, end
        except ValueError:
            end = start
    raise CheckpointError(f"{path} ends in several lines that are not JSON; the file was damaged or edited")


def _event(line: str) -> dict[str, Any]:
    event = decode(line)
    if not (isinstance(event, dict) and {"n", "t", "kind"} <= event.keys()):
        raise ValueError("not an event: it needs n, t and kind")
    return event


# -- reading ---------------------------------------------------------------------------------------


def history(folder: str | Path) -> list[dict[str, Any]]:
    """Every event ever written, also those that a resume has repeated since. A torn last line is not an event."""
    folder = Path(folder)
    path = folder / FILE
    if not folder.is_dir():
        raise UserError(f"no run folder at {folder}; `rondel train RUN.toml` makes one (key run.folder)")
    if not path.exists():
        raise UserError(f"{folder} holds no {FILE}, so it is not a run folder; give the folder named by run.folder in the recipe")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(_event(line))
        except ValueError as error:
            if number < len(lines) - 1:
                raise CheckpointError(f"{path} line {number} is not an event ({error}); the file was damaged or edited") from error
    return events


def read(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The events that count, in order: the run as if it had never been interrupted."""
    yield from settled(history(folder))


def settled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what a later `Resumed` repeats. Three rules:

    1. `Resumed(step=k)` goes back to the line of `Checkpointed(step=k)`. What follows that line is void, except facts of
       steps <= k (`StepDone(k)` is written after its checkpoint) and what stays true: RunStarted, Resumed, Warned, Stalled, Broke, Advised.
       Where the crash came before that line was written, the last event of a step <= k takes its place.
       `Resumed(checkpoint="")` begins again from nothing.
    2. Numbers are given in order, so an `Admitted(m)` voids earlier events about groups numbered m or higher: while a
       checkpoint is being written, the rollouts go on.
    3. A group that was in flight at the checkpoint finishes twice: the later `GroupFinished` of a number counts.
    """
    told: list[dict[str, Any]] = []
    highest = -1
    for event in events:
        if event["kind"] == "Resumed":
            told = _before(told, event)
        elif event["kind"] == "Admitted":
            if event["number"] <= highest:
                told = [e for e in told if e.get("number", -1) < event["number"]]
            highest = event["number"]
        told.append(event)
    last = {e["number"]: at for at, e in enumerate(told) if e["kind"] == "GroupFinished"}
    return [e for at, e in enumerate(told) if e["kind"] != "GroupFinished" or last[e["number"]] == at]


def _before(told: list[dict[str, Any]], resumed: dict[str, Any]) -> list[dict[str, Any]]:
    step = resumed["step"]
    if not resumed["checkpoint"]:
        return [e for e in told if e["kind"] in LASTING]
    saved = [at for at, e in enumerate(told) if e["kind"] == "Checkpointed" and e["step"] == step]
    earlier = [at for at, e in enumerate(told) if e["kind"] not in LASTING and e.get("step", math.inf) <= step]
    cut = max(saved or earlier, default=-1)
    return [e for at, e in enumerate(told) if e["kind"] in LASTING or e.get("step", step if at <= cut else math.inf) <= step]


# -- JSON that loses nothing -----------------------------------------------------------------------


def encode(value: Any) -> str:
    """One line of strict JSON; NaN and infinities survive."""
    how: dict[str, Any] = dict(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    try:
        return json.dumps(value, **how)  # nearly every event; rewriting each value in Python costs several times as much
    except (TypeError, ValueError):
        return json.dumps(_plain(value), **how)


def decode(text: str) -> Any:
    """The inverse of `encode`."""
    if '"$float"' not in text:
        return json.loads(text)  # nearly every event; a hook is called for each object
    return json.loads(text, object_hook=lambda node: float(node["$float"]) if node.keys() == {"$float"} else node)


def _plain(value: Any) -> Any:
    """Anything as JSON-shaped data: numpy scalars become numbers, paths become text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v) for v in value), key=str)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())  # numpy and torch, without importing either
    return str(value)
