"""Signals at random moments of tiny runs in every mode: what is hit comes back or is named,
nothing is trained twice, nothing is left behind.

rondel bench chaos                         every mode and victim twice, and four that stand still: some 30
                                           minutes on two cores
rondel bench chaos --only ranks --each 1   the modes whose name has the word

A moment is a step of the run (0: while it is built) and a delay within it. A table, one JSON
object on the last line, exit code 0 only if every run recovered in less than `--bar`
seconds or ended with the victim's name, and
was then completed by the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _run_processes import MARK, family, marked, start_run, wait_for_none
from _work import median

from rondel.runtime.journal.log import read

STEPS, PATIENCE = 16, 6.0
RAYS = 90.0  # seconds in which Ray's own two agents end after a driver that was killed: about a minute
SMALL = {"loop.steps": STEPS}
STALE = {"loop.max_staleness": 1, "algo.correction": {"kind": "importance"}, "engine.sampling": {"max_tokens": 16}}
APART = {"place.kind": "split", "place.patience": PATIENCE}
MODES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "shared, synchronous": ({}, ["reward", "controller"]),
    "two devices, stale, hold": ({**STALE, "place.kind": "split", "place.cluster": "local"}, ["reward", "controller"]),
    "processes, synchronous": (APART, ["engine-0", "trainer-0", "reward", "controller"]),
    "processes, stale, hold": (
        {**APART, **STALE, "loop.max_staleness": 2},
        ["engine-0", "trainer-0", "reward", "controller"],
    ),
    "processes, stale, drain": (
        {**APART, **STALE, "loop.in_flight": "drain"},
        ["engine-0", "trainer-0", "reward", "controller"],
    ),
    "processes, stale, abort": (
        {**APART, **STALE, "loop.in_flight": "abort"},
        ["engine-0", "trainer-0", "reward", "controller"],
    ),
    "two engines, stale, hold": ({**APART, **STALE, "place.engines": 2}, ["engine-0", "engine-1", "controller"]),
    "two engines, synchronous": ({**APART, "place.engines": 2}, ["engine-0", "engine-1"]),
    "two ranks, synchronous": ({**APART, "place.ranks": 2}, ["trainer-0", "trainer-1", "engine-0", "controller"]),
    "ray, synchronous": ({**APART, "place.cluster": "ray"}, ["engine-0", "trainer-0", "reward", "controller"]),
    "ray, stale, hold": (
        {**APART, **STALE, "loop.max_staleness": 2, "place.cluster": "ray"},
        ["engine-0", "trainer-0", "controller"],
    ),
}
STOPPED = [
    ("processes, synchronous", "engine-0"),
    ("processes, stale, hold", "trainer-0"),
    ("two ranks, synchronous", "trainer-1"),
    ("ray, synchronous", "engine-0"),
]


@dataclass
class Blow:
    """One signal and what came of it."""

    mode: str
    victim: str
    step: int
    delay: float
    what: signal.Signals = signal.SIGKILL
    ended: str = ""  # recovered, named, or what went wrong
    seconds: float | None = None  # from the signal to the next step; of a dead controller from the next start on
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        moment = f"step {self.step} + {self.delay:.2f} s"
        return f"{self.mode:<26} {self.victim:<11} {self.what.name:<8} {moment:<17} {self.ended}{took}{'; '.join(['', *self.faults])}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=2, help="moments for each mode and victim")
    parser.add_argument("--only", default="", help="modes whose name has this word")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bar", type=float, default=60.0, help="seconds until the next step")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the runs live; a temporary folder unless given"
    )
    parser.add_argument("--json", action="store_true", help="no table")
    args = parser.parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    draw, blows = random.Random(args.seed), []
    for mode, (_, victims) in MODES.items():
        for victim in victims:
            blows += [Blow(mode, victim, draw.randrange(STEPS - 2), draw.uniform(0.0, 0.4)) for _ in range(args.each)]
    blows += [
        Blow(mode, victim, draw.randrange(1, STEPS - 4), draw.uniform(0.0, 0.4), signal.SIGSTOP)
        for mode, victim in STOPPED
    ]
    # all are drawn, so that a part has the moments of the whole
    chosen = [blow for blow in blows if args.only in blow.mode]
    for n, blow in enumerate(chosen, start=1):
        strike(blow, folder / f"run-{n}", args.bar)
        print(f"{n:>3} of {len(chosen)}  {blow}", file=sys.stderr, flush=True)
    if not args.json:
        table(chosen)
    wrong = [str(blow) for blow in chosen if blow.faults]
    seconds = [blow.seconds for blow in chosen if blow.seconds is not None]
    how = {name: sum(blow.ended == name for blow in chosen) for name in ("recovered", "named", "failed")}
    print(
        json.dumps(
            {"moments": len(chosen), **how, "slowest_s": max(seconds), "median_s": median(seconds), "wrong": wrong}
        ),
        flush=True,
    )
    if args.folder is None and not wrong:
        shutil.rmtree(folder)
    sys.exit(f"the folders are kept in {folder}" if wrong else 0)


def table(blows: list[Blow]) -> None:
    print(f"{'mode':<26} {'victim':<11} {'signal':<8} moments  recovered  named  slowest")
    for key in dict.fromkeys((blow.mode, blow.victim, blow.what.name) for blow in blows):
        mine = [blow for blow in blows if (blow.mode, blow.victim, blow.what.name) == key]
        slowest = max([blow.seconds for blow in mine if blow.seconds is not None], default=float("nan"))
        counts = [len(mine), *(sum(blow.ended == name for blow in mine) for name in ("recovered", "named"))]
        print(f"{key[0]:<26} {key[1]:<11} {key[2]:<8} {counts[0]:>7}  {counts[1]:>9}  {counts[2]:>5}  {slowest:>6.1f}")


# -- one run -----------------------------------------------------------------------------------------


def strike(blow: Blow, folder: Path, bar: float) -> None:
    """Start, hit, wait for the end, start again if it ended, and look at everything."""
    before, mark, within = set(os.listdir("/dev/shm")), uuid.uuid4().hex, RAYS if "ray" in blow.mode else 2.0
    process, said = start_run({**SMALL, **MODES[blow.mode][0]}, folder, mark)
    at = moment(blow, folder, process)
    time.sleep(blow.delay)
    mine = family(mark)
    found = [process.pid] if blow.victim == "controller" else [pid for pid, name in mine.items() if name == blow.victim]
    for pid in found[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, blow.what)
    hit = time.time()
    if not found or at == "its end":
        blow.faults.append(f"nobody to hit, there are {sorted(mine.values())}, and the run is at {at}")
    if blow.victim == "controller":
        process.wait()
        orphans(blow, mark, mine, within)
        hit = time.time()
        process, said = start_run({**SMALL, **MODES[blow.mode][0]}, folder, mark)
    code = ended(blow, process, said, mark)
    if code == 1 and any(word in said.read_text() for word in (blow.victim, "the reward")):
        blow.ended = "named"
        process, said = start_run({**SMALL, **MODES[blow.mode][0]}, folder, mark)
        code = ended(blow, process, said, mark)
    else:
        blow.ended = "recovered"
    if code:
        blow.ended = "failed"
        blow.faults.append(f"exit code {code}: {' '.join(said.read_text().split())[-600:]}")
    orphans(blow, mark, mine, within)
    if left := [
        name for name in set(os.listdir("/dev/shm")) - before if any(str(pid) in name for pid in [*mine, process.pid])
    ]:
        blow.faults.append(f"left in shared memory: {left}")
    if blow.ended != "failed":
        inspect(blow, folder, hit, bar)
    if not blow.faults:
        shutil.rmtree(folder)


def moment(blow: Blow, folder: Path, process: subprocess.Popen) -> str:
    """Wait until the run has done so many steps; at step 0 until the victim is there."""
    journal, deadline = folder / "journal.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        told = journal.read_text() if journal.is_file() else ""
        if told.count('"kind":"StepDone"') >= blow.step and (
            blow.step or blow.victim in [*victims(process.pid), "controller"]
        ):
            return f"step {told.count('StepDone')}"
        time.sleep(0.01)
    return "its end"


def victims(parent: int) -> list[str]:
    with open(f"/proc/{parent}/environ", "rb") as file:
        mark = next(
            (word.partition(b"=")[2].decode() for word in file.read().split(b"\0") if word.startswith(MARK.encode())),
            "",
        )
    return list(marked(mark).values()) if mark else []


def ended(blow: Blow, process: subprocess.Popen, said: Path, mark: str) -> int:
    try:
        return process.wait(180)
    except subprocess.TimeoutExpired:
        for pid in marked(mark):  # every stack, into its log
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        blow.faults.append("it hangs")
        process.kill()
        return process.wait()


def orphans(blow: Blow, mark: str, mine: dict[int, str], within: float) -> None:
    if left := wait_for_none(mark, mine, within):
        blow.faults.append(f"left behind: {left}")


def inspect(blow: Blow, folder: Path, hit: float, bar: float) -> None:
    """The journal: how long until the next step, each step once, the ledger, each group
    once; who stood still was named in time.
    """
    told = list(read(folder))
    done = [e for e in told if e["kind"] == "StepDone"]
    after = [e["t"] - hit for e in told if e["kind"] in ("StepDone", "RunEnded") and e["t"] > hit]
    blow.seconds = round(min(after), 2) if after else None
    if blow.seconds is None or blow.seconds > bar:
        blow.faults.append(f"no step within {bar:g} s")
    if [e["step"] for e in done] != list(range(1, STEPS + 1)):
        blow.faults.append(f"steps {[e['step'] for e in done]}")
    if wrong := [e["step"] for e in done if 2 * e["ledger"]["issued"] != sum(e["ledger"].values())]:
        blow.faults.append(f"the ledger does not balance after steps {wrong}")
    numbers = [n for e in told if e["kind"] == "GroupsTaken" for n in e["numbers"]]
    if len(numbers) != len(set(numbers)):
        blow.faults.append("a group was trained twice")
    if len(numbers) != 4 * STEPS:
        blow.faults.append(f"{len(numbers)} groups were trained")
    if blow.what == signal.SIGSTOP:
        named = [
            e["t"] - hit
            for e in told
            if e["kind"] == "Warned" and "no sign of life" in e["message"] and blow.victim in e["message"]
        ]
        if not named or min(named) > PATIENCE + 4:
            blow.faults.append(f"it stood still and was named after {min(named, default=float('inf')):.1f} s")


if __name__ == "__main__":
    main()
