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
from rondel.runtime.journal.log import read_history

PID = 1
TRACKS = {"controller": 1, "groups": 2}  # further workers come behind
# of chrome://tracing; Perfetto colours by name
COLOURS = {"kept": "good", "dropped": "bad", "failed": "terrible", "unfinished": "grey"}
APART = 0.05  # seconds between two slices that are a pause, and not the way of an event

Json = dict[str, Any]


def build_trace(folder: str | Path) -> Json:
    """What a viewer opens."""
    events = read_history(folder)
    if not events:
        raise UserError(f"the journal in {folder} is empty: the run has not started, so there is nothing to draw")
    return {"traceEvents": trace_marks(events), "displayTimeUnit": "ms", "otherData": {"run": str(folder)}}


def trace_marks(events: list[Json]) -> list[Json]:
    """The marks of events, or of a stretch of them; what they are called comes first."""
    drawing = _Drawing(events[0]["t"])
    for event in events:
        drawing.draw_event(event)
    drawing.end_drawing(events[-1]["t"])
    return [*drawing.track_names(), *drawing.out]


class _Drawing:
    def __init__(self, began: float) -> None:
        self.began = began
        self.out: list[Json] = []
        self.tracks = dict(TRACKS)
        self.until: dict[str, float] = {}  # when the last slice of a track ended
        self.life = 0
        self.open: dict[int, tuple[str, float]] = {}  # groups: where they are, since when
        self.tokens = 0

    def draw_event(self, e: Json) -> None:
        t = e["t"] - self.began
        match e["kind"]:
            case "RunStarted" | "Resumed":
                self._close_all(t)
                self.life += 1
                self.until.clear()
            case "Admitted":
                self.open[e["number"]] = ("written", t)
                self._add_counter("groups in flight", t, len(self.open))
            case "GroupFinished":
                verdict = "kept" if e["kept"] else "failed" if e["failed"] and not e["rewards"] else "dropped"
                name = verdict if e["kept"] else f"{verdict}: {e['reason']}"
                self.tokens += sum(e["lengths"])
                told = {"task": e["task"], "rewards": e["rewards"], "lengths": e["lengths"], "born": e["born"]}
                self._draw_group(e["number"], name, t, told, COLOURS[verdict])
                if e["kept"]:
                    self.open[e["number"]] = ("in the buffer", t)
                self._add_counter("groups in flight", t, len(self.open))
            case "GroupsTaken":
                for number, born in zip(e["numbers"], e["born"]):
                    self._draw_group(number, "in the buffer", t, {"lag": e["version"] - born, "step": e["step"]})
                    self.open[number] = ("trained", t)
                if e["born"]:
                    self._add_counter("lag", t, sum(e["version"] - b for b in e["born"]) / len(e["born"]))
            case "StepDone":
                self._draw_step(e, t)
                for number in [n for n, (where, _) in self.open.items() if where == "trained"]:
                    self._draw_group(number, "trained", t, {"step": e["step"]})
            case "WorkerTime":
                laps = e.get("laps") or list(e["seconds"].items())
                at = self._slice_start(e["worker"], t, sum(s for _, s in laps))
                for kind, seconds in laps:
                    at = self._add_slice(e["worker"], kind, at, seconds, {})
            case "Warned" | "Stalled" | "Broke":
                self._add_event(ph="i", name=e["kind"], cat="said", ts=t, tid=1, s="p", args={"message": e["message"]})
            case "Evaluated" | "Checkpointed":
                self._add_event(ph="i", name=f"{e['kind']} {e['step']}", cat="milestone", ts=t, tid=1, s="t", args={})

    def end_drawing(self, t: float) -> None:
        self._close_all(t - self.began)

    def track_names(self) -> Iterator[Json]:
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

    def _draw_step(self, e: Json, t: float) -> None:
        """The laps of a step follow each other without a gap, and the next step follows:
        only the first needs the journal's clock.
        """
        phases = {name: s for name, s in e["seconds"].items() if name != "step"}
        total = sum(phases.values())
        at = begun = self._slice_start("controller", t, total)
        told = {"version": e["version"], "note": e["note"], "reward": e["metrics"].get("score/reward_mean")}
        self._add_event(
            ph="X",
            name=f"step {e['step']}",
            cat="step",
            ts=at,
            dur=total,
            tid=1,
            args={k: v for k, v in told.items() if v},
        )
        for name, seconds in phases.items():
            at = self._add_slice("controller", name, at, seconds, {"step": e["step"]})
        self.until["controller"] = begun + total
        if total > 0:
            self._add_counter("tokens per second", t, self.tokens / total)
        self.tokens = 0

    def _slice_start(self, track: str, t: float, seconds: float) -> float:
        """Behind the slice before; after a pause by the clock of the journal."""
        before = self.until.get(track)
        begun = t - seconds
        if before is None:
            return max(0.0, begun)
        return begun if begun - before > APART else before

    def _add_slice(self, track: str, name: str, at: float, seconds: float, args: Json) -> float:
        number = self.tracks.setdefault(track, len(self.tracks) + 1)
        self._add_event(
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

    def _draw_group(self, number: int, name: str, t: float, args: Json, colour: str = "") -> None:
        if number not in self.open:
            return
        _, since = self.open.pop(number)
        key: Json = {"cat": "group", "id": f"{self.life}.{number}", "name": name, "tid": TRACKS["groups"]}
        more: Json = {"cname": colour} if colour else {}
        self._add_event(ph="b", ts=since, args={"group": number, **args}, **key, **more)
        self._add_event(ph="e", ts=max(since, t), args={}, **key)

    def _close_all(self, t: float) -> None:
        for number in list(self.open):
            self._draw_group(number, "unfinished", t, {}, COLOURS["unfinished"])

    def _add_counter(self, name: str, t: float, value: float) -> None:
        self._add_event(ph="C", name=name, cat="counter", ts=t, tid=0, args={name: value})

    def _add_event(self, *, ts: float, dur: float | None = None, **fields: Any) -> None:
        at = round(ts * 1e6)
        # ends are rounded, so neighbours touch
        length = {} if dur is None else {"dur": max(0, round((ts + dur) * 1e6) - at)}
        self.out.append({"pid": PID, "ts": max(0, at), **length, **fields})
