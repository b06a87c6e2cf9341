"""What is killed comes back or is named; nothing is trained twice, no process is left (laws 1, 9, 10, 14, 15)."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from run_kit import check, events, run

from rondel.words.errors import RondelError
from rondel.words.events import Event, GroupFinished, GroupsTaken, StepDone, Synced, Warned, subscribe

KINDS = {"rollout": GroupFinished, "taken": GroupsTaken, "synced": Synced, "step": StepDone}
SPLIT = {"place__kind": "split", "place__patience": 6.0, "loop__warmup__steps": 0, "loop__steps": 8}
STALE = {"loop__max_staleness": 1, "algo__correction": {"kind": "importance"}, "engine__sampling": {"max_tokens": 16}}


def children(of: str) -> list[int]:
    """Processes of this one that were started as `of`, by their log."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/stat") as stat:
                words = stat.read().rpartition(")")[2].split()
                mine = b"rondel.runtime.cluster.child" in line.read() and int(words[1]) == os.getpid() and words[0] != "Z"
            if mine and of in os.readlink(f"/proc/{pid}/fd/1"):
                found.append(int(pid))
        except OSError:
            continue
    return found


class Strike:
    """Send a signal to a worker at the n-th event of a kind, once."""

    def __init__(self, who: str, kind: str, n: int, what: signal.Signals = signal.SIGKILL) -> None:
        self.who, self.kind, self.left, self.what, self.hit = who, KINDS[kind], n, what, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, self.kind):
            self.left -= 1
            if self.left == 0:
                threading.Thread(target=self._strike).start()  # at any moment of what follows

    def _strike(self) -> None:
        for pid in children(self.who):
            os.kill(pid, self.what)
            self.hit += 1


def struck(folder: Path, strike: Strike, **changes) -> None:
    stop = subscribe(strike)
    try:
        run(folder, **{**SPLIT, **changes})
    finally:
        stop()
    assert strike.hit == 1
    assert not children("")


@pytest.mark.parametrize(("kind", "n"), [("rollout", 6), ("taken", 3), ("synced", 4), ("step", 2)])
@pytest.mark.parametrize("mode", [{}, STALE], ids=["synchronous", "stale"])
def test_a_killed_engine_comes_back(tmp_path, mode, kind, n):
    struck(tmp_path, Strike("engine-0", kind, n), **mode)
    check(tmp_path, staleness=mode.get("loop__max_staleness", 0), total=8)
    said = [e["message"] for e in events(tmp_path, "Warned")]
    assert any("worker engine-0" in text and "SIGKILL" in text and "started again (1 of" in text for text in said)
    numbers = [n for e in events(tmp_path, "GroupsTaken") for n in e["numbers"]]
    assert len(numbers) == len(set(numbers)), "a group was trained twice"


def test_a_stopped_engine_is_named_and_replaced(tmp_path):
    struck(tmp_path, Strike("engine-0", "rollout", 6, signal.SIGSTOP))
    check(tmp_path, staleness=0, total=8)
    assert any("gives no sign of life" in e["message"] and "engine-0" in e["message"] for e in events(tmp_path, "Warned"))


@pytest.mark.parametrize(("kind", "n"), [("rollout", 22), ("taken", 5)])
def test_a_killed_rank_goes_on_from_the_last_checkpoint(tmp_path, kind, n):
    struck(tmp_path, Strike("trainer-1", kind, n), place__ranks=2)
    assert [e["step"] for e in events(tmp_path, "StepDone")] == list(range(1, 9))
    assert any("trainer-1" in e["message"] and "last checkpoint" in e["message"] for e in events(tmp_path, "Warned"))


def test_what_keeps_dying_is_an_error_with_its_cause(tmp_path):
    strikes = [Strike("engine-0", "rollout", 2)]

    def again(event: Event) -> None:
        if isinstance(event, Warned) and "started again" in event.message:
            threading.Timer(0.5, lambda: strikes[0]._strike()).start()

    stops = [subscribe(strikes[0]), subscribe(again)]
    try:
        with pytest.raises((RondelError, BaseExceptionGroup)) as told:
            run(tmp_path, **SPLIT, loop__seed=1)
    finally:
        for stop in stops:
            stop()
    found = told.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert "an engine ended 6 times, the last time:" in str(found) and "SIGKILL" in str(found)
    assert not children("")
