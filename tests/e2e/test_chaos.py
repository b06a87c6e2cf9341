"""What is killed comes back or is named; nothing is trained twice, no process is left (laws 1, 9, 10, 15)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kits import forked
from kits.runs import check, events, run, tiny
from kits.sweeps import covering
from rondel.assemble import train
from rondel.core.errors import RondelError
from rondel.core.events import Event, GroupFinished, GroupsTaken, StepDone, Synced, Warned, emit, subscribe
from rondel.runtime.cluster import forkserver

pytestmark = pytest.mark.slow

KINDS = {"rollout": GroupFinished, "taken": GroupsTaken, "synced": Synced, "step": StepDone}
SPLIT = {"place__kind": "split", "place__patience": 6.0, "loop__warmup__steps": 0, "loop__steps": 4}
STALE = {"loop__max_staleness": 1, "algo__correction": {"kind": "importance"}, "engine__sampling": {"max_tokens": 16}}


def children(of: str) -> list[int]:
    """Processes of this one that were started as `of`: workers by their log, the reward's by its program."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file, open(f"/proc/{pid}/stat") as stat:
                words, line = stat.read().rpartition(")")[2].split(), file.read()
            if int(words[1]) not in (os.getpid(), forkserver.forkserver_pid()) or words[0] == "Z":
                continue
            kind = (
                os.readlink(f"/proc/{pid}/fd/1")
                if b"rondel.runtime.cluster." in line and int(pid) != forkserver.forkserver_pid()
                else "reward"
                if b"rondel.score.worker" in line
                else None
            )
            if kind is not None and of in kind:
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


# in each mode, between steps; while answers are written: one that is stopped, below, and two on Ray in test_places.py; while
# the trainer has the batch: where changes travel, below
STRUCK = [
    (mode, n) for mode in ("synchronous", "stale") for n in (("rollout", 6), ("taken", 3), ("synced", 4), ("step", 2))
]


@pytest.mark.parametrize(("mode", "moment"), covering(STRUCK, [STRUCK[2], STRUCK[7]]), ids=str)
def test_a_killed_engine_comes_back(tmp_path, mode, moment):
    mode = STALE if mode == "stale" else {}
    struck(tmp_path, Strike("engine-0", *moment), **mode)
    check(tmp_path, staleness=mode.get("loop__max_staleness", 0), total=4)
    said = [e["message"] for e in events(tmp_path, "Warned")]
    assert any("worker engine-0" in text and "SIGKILL" in text and "started again (1 of" in text for text in said)
    numbers = [n for e in events(tmp_path, "GroupsTaken") for n in e["numbers"]]
    assert len(numbers) == len(set(numbers)), "a group was trained twice"


@pytest.mark.parametrize("mode", covering([{}, STALE], [STALE]), ids=["synchronous", "stale"])
def test_an_engine_that_comes_back_gets_whole_weights_where_changes_travel(tmp_path, mode):
    """It has none that a delta could change."""
    struck(tmp_path, Strike("engine-0", "taken", 3), sync__kind="delta", **mode)
    check(tmp_path, staleness=mode.get("loop__max_staleness", 0), total=4)


@pytest.mark.sweep  # between steps: test_engines.py; in an update: below
@pytest.mark.parametrize(("kind", "n"), [("rollout", 6), ("taken", 3)])
def test_one_of_two_engines_comes_back(tmp_path, kind, n):
    struck(tmp_path, Strike("engine-1", kind, n), **STALE, place__engines=2, loop__steps=6)
    check(tmp_path, staleness=1, total=6)
    assert any(
        "worker engine-1" in e["message"] and "started again" in e["message"] for e in events(tmp_path, "Warned")
    )


def test_an_engine_lost_in_an_update_joins_again(tmp_path):
    """The router leaves it behind, the update goes through with the other one, and then there are two again."""
    parts = []

    def strike(event: Event) -> None:
        if isinstance(event, Begun) and event.number == 4:
            [os.kill(pid, signal.SIGKILL) for pid in children("engine-1")]

    def built(made) -> None:
        parts.append(made)
        plain, seen = made.trainer.publish, iter(range(99))

        async def publish(route):
            emit(Begun(next(seen)))
            return await plain(route)

        made.trainer.publish = publish

    stop = subscribe(strike)
    try:
        train(tiny(tmp_path, **SPLIT | {"loop__steps": 6}, place__engines=2), quiet=True, built=built)
    finally:
        stop()
    check(tmp_path, staleness=0, total=6)
    assert sorted(parts[0].engine.replicas) == ["engine-0", "engine-1"] and not parts[0].engine.lost
    assert parts[0].placed.remotes["engine-1"].restarts == 1


@dataclass
class Begun(Event):
    number: int


def test_a_killed_reward_worker_is_hired_anew(tmp_path):
    """Whom it hits between two calls costs nothing; a call that it hits is a failure with its reason."""
    stop = subscribe(strike := Strike("reward", "taken", 3))
    try:
        run(tmp_path, loop__warmup__steps=0, loop__steps=4)
    finally:
        stop()
    assert strike.hit == 1 and not children("")
    check(tmp_path, staleness=0, total=4)


def test_a_stopped_engine_is_named_and_replaced(tmp_path):
    struck(tmp_path, Strike("engine-0", "rollout", 6, signal.SIGSTOP), place__patience=3.0)
    check(tmp_path, staleness=0, total=4)
    assert any(
        "gives no sign of life" in e["message"] and "engine-0" in e["message"] for e in events(tmp_path, "Warned")
    )


RANKS = [
    ("rollout", 14, {"place__ranks": 2}),
    ("taken", 4, {"place__mesh": {"tp": 2}}),
    ("taken", 3, {"place__mesh": {"pp": 2}}),
]


@pytest.mark.parametrize(("kind", "n", "place"), covering(RANKS, [RANKS[2]]))
def test_a_killed_rank_goes_on_from_the_last_checkpoint(tmp_path, kind, n, place):
    struck(tmp_path, Strike("trainer-1", kind, n), run__checkpoint__every=2, **place)
    assert [e["step"] for e in events(tmp_path, "StepDone")] == [1, 2, 3, 4]
    assert any("trainer-1" in e["message"] and "last checkpoint" in e["message"] for e in events(tmp_path, "Warned"))


@pytest.mark.sweep  # half a minute; one kill on a stage above, a stopped rank below
def test_two_kills_in_one_run_on_a_mesh_leave_its_bits():
    """Of random workers at random moments, the second in what the first has left (`rondel bench mesh_kills` makes twenty):
    weights and moments of a run that nobody interrupted, no process, shared memory or group trained twice.
    """
    words = ["--mesh", "tp=2", "--kills", "2", "--stops", "0", "--steps", "8", "--seed", "1", "--json"]
    done = forked.run(["bench", "mesh_kills", *words])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])["tp=2"]
    assert told["strikes"] == told.get("recovered", 0) + told.get("named", 0) == 2 and not told["faults"]


def test_a_stopped_rank_is_named_and_the_run_goes_on(tmp_path):
    struck(tmp_path, Strike("trainer-1", "taken", 3, signal.SIGSTOP), run__checkpoint__every=2, place__ranks=2)
    assert [e["step"] for e in events(tmp_path, "StepDone")] == [1, 2, 3, 4]
    said = [e["message"] for e in events(tmp_path, "Warned")]
    assert any("gives no sign of life" in text and "trainer-1" in text and "asked for: step" in text for text in said)
    assert "most recent call first" in (tmp_path / "logs" / "trainer-0.log").read_text(), (
        "what the other one waited for"
    )


def test_what_keeps_dying_is_an_error_with_its_cause(tmp_path):
    first, over = Strike("engine-0", "rollout", 2), threading.Event()

    def again(event: Event) -> None:
        if isinstance(event, Warned) and "started again" in event.message:
            threading.Timer(0.05, kill).start()

    def kill() -> None:
        while not (found := children("engine-0")) and not over.is_set():
            time.sleep(0.05)  # it is being started
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    stops = [subscribe(first), subscribe(again)]
    try:
        with pytest.raises((RondelError, BaseExceptionGroup)) as told:
            run(tmp_path, **SPLIT | {"loop__seed": 1, "loop__steps": 200})
    finally:
        over.set()
        for stop in stops:
            stop()
    found = told.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert "an engine ended 6 times, the last time:" in str(found) and "SIGKILL" in str(found)
    assert not children("")
