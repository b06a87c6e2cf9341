"""A run as a picture of its time: trace events for Perfetto (ui.perfetto.dev) and
chrome://tracing, from the journal alone.

    controller   step 12 [ wait | prepare | hand_over | train | sync ]     a slice a step, its phases inside
    engine-0     generate | score | held | generate | idle ...             what each worker told of itself
    groups       kept ─────── in the buffer ─── trained                    asynchronous: many at once, named by what became of them
    counters     lag, tokens/s, reward, groups in flight

Format: the "Trace Event Format" of Chromium. Times are microseconds since the first event; the
whole history is drawn, also what a resume repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rondel.core.errors import UserError
from rondel.runtime.journal.log import history

PID = 1
TRACKS = {"controller": 1, "groups": 2}  # further workers come behind
# of chrome://tracing; Perfetto colours by name
COLOURS = {"kept": "good", "dropped": "bad", "failed": "terrible", "unfinished": "grey"}
APART = 0.05  # seconds between two slices that are a pause, and not the way of an event

Json = dict[str, Any]


def trace(folder: str | Path) -> Json:
    """What a viewer opens."""
    events = history(folder)
    if not events:
        raise UserError(f"the journal in {folder} is empty: the run has not started, so there is nothing to draw")
    return {"traceEvents": drawn(events), "displayTimeUnit": "ms", "otherData": {"run": str(folder)}}


def drawn(events: list[Json]) -> list[Json]:
    """The marks of events, or of a stretch of them; what they are called comes first."""
    drawing = _Drawing(events[0]["t"])
    for event in events:
        drawing.read(event)
    drawing.end(events[-1]["t"])
    return [*drawing.names(), *drawing.out]


class _Drawing:
    def __init__(self, began: float) -> None:
        self.began = began
        self.out: list[Json] = []
        self.tracks = dict(TRACKS)
        self.until: dict[str, float] = {}  # when the last slice of a track ended
        self.life = 0
        self.open: dict[int, tuple[str, float]] = {}  # groups: where they are, since when
        self.tokens = 0

    def read(self, e: Json) -> None:
        t = e["t"] - self.began
        match e["kind"]:
            case "RunStarted" | "Resumed":
                self._close_all(t)
                self.life += 1
                self.until.clear()
            case "Admitted":
                self.open[e["number"]] = ("written", t)
                self._count("groups in flight", t, len(self.open))
            case "GroupFinished":
                verdict = "kept" if e["kept"] else "failed" if e["failed"] and not e["rewards"] else "dropped"
                name = verdict if e["kept"] else f"{verdict}: {e['reason']}"
                self.tokens += sum(e["lengths"])
                told = {"task": e["task"], "rewards": e["rewards"], "lengths": e["lengths"], "born": e["born"]}
                self._group(e["number"], name, t, told, COLOURS[verdict])
                if e["kept"]:
                    self.open[e["number"]] = ("in the buffer", t)
                self._count("groups in flight", t, len(self.open))
            case "GroupsTaken":
                for number, born in zip(e["numbers"], e["born"]):
                    self._group(number, "in the buffer", t, {"lag": e["version"] - born, "step": e["step"]})
                    self.open[number] = ("trained", t)
                if e["born"]:
                    self._count("lag", t, sum(e["version"] - b for b in e["born"]) / len(e["born"]))
            case "StepDone":
                self._step(e, t)
                for number in [n for n, (where, _) in self.open.items() if where == "trained"]:
                    self._group(number, "trained", t, {"step": e["step"]})
            case "WorkerTime":
                laps = e.get("laps") or list(e["seconds"].items())
                at = self._start(e["worker"], t, sum(s for _, s in laps))
                for kind, seconds in laps:
                    at = self._slice(e["worker"], kind, at, seconds, {})
            case "Warned" | "Stalled" | "Broke":
                self._add(ph="i", name=e["kind"], cat="said", ts=t, tid=1, s="p", args={"message": e["message"]})
            case "Evaluated" | "Checkpointed":
                self._add(ph="i", name=f"{e['kind']} {e['step']}", cat="milestone", ts=t, tid=1, s="t", args={})

    def end(self, t: float) -> None:
        self._close_all(t - self.began)

    def names(self) -> Iterator[Json]:
        """What the tracks are called."""
        yield {"ph": "M", "pid": PID, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": "rondel"}}
        for name, number in self.tracks.items():
            yield {"ph": "M", "pid": PID, "tid": number, "ts": 0, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "M",
                "pid": PID,
                "tid": number,
                "ts": 0,
                "name": "thread_sort_index",
                "args": {"sort_index": number},
            }

    # -- kinds of marks --------------------------------------------------------------------------

    def _step(self, e: Json, t: float) -> None:
        """The laps of a step follow each other without a gap, and the next step follows:
        only the first needs the journal's clock.
        """
        phases = {name: s for name, s in e["seconds"].items() if name != "step"}
        total = sum(phases.values())
        at = begun = self._start("controller", t, total)
        told = {"version": e["version"], "note": e["note"], "reward": e["metrics"].get("score/reward_mean")}
        self._add(
            ph="X",
            name=f"step {e['step']}",
            cat="step",
            ts=at,
            dur=total,
            tid=1,
            args={k: v for k, v in told.items() if v},
        )
        for name, seconds in phases.items():
            at = self._slice("controller", name, at, seconds, {"step": e["step"]})
        self.until["controller"] = begun + total
        if total > 0:
            self._count("tokens per second", t, self.tokens / total)
        self.tokens = 0

    def _start(self, track: str, t: float, seconds: float) -> float:
        """Behind the slice before; after a pause by the clock of the journal."""
        before = self.until.get(track)
        begun = t - seconds
        if before is None:
            return max(0.0, begun)
        return begun if begun - before > APART else before

    def _slice(self, track: str, name: str, at: float, seconds: float, args: Json) -> float:
        number = self.tracks.setdefault(track, len(self.tracks) + 1)
        self._add(
            ph="X",
            name=name,
            cat="phase" if track == "controller" else "worker",
            ts=at,
            dur=seconds,
            tid=number,
            args=args,
        )
        self.until[track] = at + seconds
        return at + seconds

    def _group(self, number: int, name: str, t: float, args: Json, colour: str = "") -> None:
        if number not in self.open:
            return
        _, since = self.open.pop(number)
        key: Json = {"cat": "group", "id": f"{self.life}.{number}", "name": name, "tid": TRACKS["groups"]}
        more: Json = {"cname": colour} if colour else {}
        self._add(ph="b", ts=since, args={"group": number, **args}, **key, **more)
        self._add(ph="e", ts=max(since, t), args={}, **key)

    def _close_all(self, t: float) -> None:
        for number in list(self.open):
            self._group(number, "unfinished", t, {}, COLOURS["unfinished"])

    def _count(self, name: str, t: float, value: float) -> None:
        self._add(ph="C", name=name, cat="counter", ts=t, tid=0, args={name: value})

    def _add(self, *, ts: float, dur: float | None = None, **fields: Any) -> None:
        at = round(ts * 1e6)
        # ends are rounded, so neighbours touch
        length = {} if dur is None else {"dur": max(0, round((ts + dur) * 1e6) - at)}
        self.out.append({"pid": PID, "ts": max(0, at), **length, **fields})
