"""SIGKILL and SIGSTOP to random ranks of meshes at random moments, one after the other in the same run.

    rondel bench mesh_kills --mesh tp=2 pp=2 --kills 20 --stops 1 --json
    rondel bench mesh_kills --mesh tp=2 --engines tp=2,ep=2

Any process of the trainer or of an engine may be the victim, at any moment from its start on, which is while ranks are
joined, too. A command that ends is given again. What counts:

recovered   the next step is done, and a warning names the victim
named       the command ended with an error that names the victim
anything else is a fault: a signal without its name, no step within `--bar` seconds, a worker that is there twice,
a process or shared memory left behind, a group trained twice, a ledger that does not balance, or final weights and
moments that are not bit for bit those of a run that nobody interrupted.
One JSON object on the last line, exit code 0 only without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _run_processes import MIXTURE, marked, start_run, stat, wait_for_none
from _work import median

from rondel.runtime.journal.log import read

PATIENCE = 6.0
MESHES = [
    *("tp=2", "pp=2", "pp=2,chunks=2", "ep=2", "cp=2", "shards=2,tp=2", "tp=2,overlap=true"),
    *("tp=2 engines tp=2", "tp=2 engines tp=2,ep=2"),
]
WORKER = re.compile(r"(trainer|engine)-\d+(-rank-\d+)?")


@dataclass
class RankStrike:
    """One signal and what came of it.

    steps, delay   when: so many steps after the last one has passed, and so many seconds; 0: once its victim is there,
                   which one that stands still never is
    """

    signal: signal.Signals
    steps: int
    delay: float
    victim: str = ""
    outcome: str = ""  # recovered or named
    seconds: float = 0.0  # from the signal to the next step or to the end of the command
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{self.victim:<16} {self.signal.name}  after {self.steps} steps + {self.delay:.2f} s"
        return f"{what}: {self.outcome} in {self.seconds:.1f} s{'; '.join(['', *self.faults])}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench mesh_kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", nargs="+", default=MESHES, metavar="AXIS=N,...")
    parser.add_argument("--engines", default="", metavar="AXIS=N,...", help="of all these meshes: tp=2")
    parser.add_argument("--kills", type=int, default=20, help="of each mesh")
    parser.add_argument("--stops", type=int, default=1, help="ranks of each mesh that stand still")
    parser.add_argument("--steps", type=int, default=30, help="of a run; there are as many runs as the signals need")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bar", type=float, default=60.0, help="seconds until the next step")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs live; a temporary one unless given")
    parser.add_argument("--json", action="store_true", help="no progress")
    args = parser.parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="mesh-kills-"))
    told = {}
    for words in args.mesh:
        words += f" engines {args.engines}" if args.engines else ""
        told[words] = MeshChaos(words, folder / words.replace(" ", "-"), args).strike_all()
    wrong = [fault for one in told.values() for fault in one["faults"]]
    print(json.dumps(told), flush=True)
    if args.folder is None and not wrong:
        shutil.rmtree(folder)
    sys.exit(f"the folders are kept in {folder}" if wrong else 0)


def settings_of(words: str, steps: int) -> dict[str, Any]:
    """ "tp=2 engines tp=2,ep=2" -> what it changes in the recipe."""
    mesh, _, engines = words.partition(" engines ")
    changes: dict[str, Any] = {"loop.steps": steps, "place.kind": "split", "place.patience": PATIENCE}
    changes["place.mesh"] = _axes(mesh)
    layers = changes["place.mesh"].get("pp", 1) * changes["place.mesh"].get("chunks", 1)
    if engines:
        changes["place.engines"] = _axes(engines)
    if "ep=" in words:
        changes |= {"model.path": MIXTURE, "trainer.routing_replay": True}
    elif layers > 2:
        changes["model.path.num_hidden_layers"] = layers
    return changes


def _axes(words: str) -> dict[str, int | str]:
    pairs = (word.partition("=") for word in words.split(","))
    return {axis: n == "true" or (int(n) if n.isdecimal() else n) for axis, _, n in pairs}


class MeshChaos:
    """All signals to the runs of one mesh."""

    def __init__(self, words: str, folder: Path, args: argparse.Namespace) -> None:
        self.words, self.folder, self.args = words, folder, args
        self.changes, self.draw = settings_of(words, args.steps), random.Random(f"{args.seed} {words}")
        self.run, self.runs = folder / "run-1", 1
        self.faults: list[str] = []
        self.seen: dict[int, str] = {}  # every process that was there
        self.shared = set(os.listdir("/dev/shm"))

    def strike_all(self) -> dict[str, Any]:
        kinds = [signal.SIGKILL] * self.args.kills + [signal.SIGSTOP] * self.args.stops
        strikes = [RankStrike(kind, self.draw.choice((0, 0, 1, 2, 3)), self.draw.uniform(0.0, 1.0)) for kind in kinds]
        for strike in strikes:  # a worker may be silent for minutes while it is built, from a busy disk
            strike.steps = max(strike.steps, int(strike.signal == signal.SIGSTOP))
        self.start()
        for n, strike in enumerate(strikes, start=1):
            self.strike(strike)
            self.tell(f"{n:>3} of {len(strikes)}  {strike}")
        self.finish()
        self.compare()
        self.faults += [str(strike) for strike in strikes if strike.faults]
        if not self.faults:
            shutil.rmtree(self.folder)
        ends, victims = Counter(s.outcome for s in strikes), Counter(s.victim for s in strikes)
        seconds = [s.seconds for s in strikes]
        return {
            "strikes": len(strikes), **ends, "victims": dict(sorted(victims.items())), "runs": self.runs,
            "median_s": round(median(seconds), 1), "slowest_s": max(seconds), "faults": self.faults,
        }  # fmt: skip

    def tell(self, text: str) -> None:
        if not self.args.json:
            print(f"{self.words:<24} {text}", file=sys.stderr, flush=True)

    # -- the command -----------------------------------------------------------------------------------

    def start(self) -> None:
        self.mark = uuid.uuid4().hex
        self.process, self.said = start_run(self.changes, self.run, self.mark)

    def finish(self) -> None:
        """Wait for the end of the command, and look at what it left."""
        try:
            if code := self.process.wait(self.args.steps * 10):
                self.faults.append(f"exit code {code}: {' '.join(self.said.read_text().split())[-600:]}")
        except subprocess.TimeoutExpired:
            self.faults.append("it hangs")
            self.process.kill()
            self.process.wait()
        self.look_behind(self.faults)

    def look_behind(self, faults: list[str]) -> None:
        if left := wait_for_none(self.mark, self.seen, within=2.0):
            faults.append(f"left behind: {left}")
        gone = [str(pid) for pid in [*self.seen, self.process.pid]]
        if left_in := [n for n in set(os.listdir("/dev/shm")) - self.shared if any(pid in n for pid in gone)]:
            faults.append(f"left in shared memory: {left_in}")
        self.seen = {}

    def begin_another(self) -> None:
        """The run was complete before a signal came."""
        self.finish()
        self.compare()
        self.runs += 1
        self.run = self.folder / f"run-{self.runs}"
        self.start()

    # -- one signal ------------------------------------------------------------------------------------

    def strike(self, strike: RankStrike) -> None:
        while not self.wait_for(strike):
            self.begin_another()
        living = {pid: name for pid, name in marked(self.mark).items() if WORKER.fullmatch(name)}
        self.seen |= living
        pid = self.draw.choice(sorted(living))
        strike.victim, hit = living[pid], time.time()
        os.kill(pid, strike.signal)
        self.await_outcome(strike, hit)
        strike.seconds = round(time.time() - hit, 2)
        if twice := [n for n, count in Counter(self.workers().values()).items() if count > 1]:
            strike.faults.append(f"there twice: {twice}")

    def wait_for(self, strike: RankStrike) -> bool:
        """Whether there is a process to strike at that moment."""
        done, deadline = self.steps_done(), time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.steps_done() >= done + strike.steps and self.workers():
                time.sleep(strike.delay)
                if self.process.poll() is None and self.workers() and "RunEnded" not in self.journal():
                    return True
            time.sleep(0.02)
        return False

    def workers(self) -> dict[int, str]:
        return {pid: name for pid, name in marked(self.mark).items() if WORKER.fullmatch(name) and stat(pid)}

    def await_outcome(self, strike: RankStrike, hit: float) -> None:
        """The next step with a warning of the victim's name, or an end with it; then the command is given again."""
        deadline = hit + self.args.bar
        while time.time() < deadline:
            if self.process.poll() is not None:
                return self.judge_end(strike)
            after = [e for e in self.events() if e["t"] > hit]
            named = [e["t"] - hit for e in after if e["kind"] == "Warned" and strike.victim in e["message"]]
            if named and any(e["kind"] in ("StepDone", "RunEnded") and e["t"] - hit > named[0] for e in after):
                strike.outcome = "recovered"
                if strike.signal == signal.SIGSTOP and named[0] > PATIENCE + 4:
                    strike.faults.append(f"it stood still and was named after {named[0]:.1f} s")
                return None
            time.sleep(0.05)
        warned = [e["message"] for e in self.events() if e["kind"] == "Warned" and e["t"] > hit]
        strike.outcome = "lost"
        strike.faults.append(f"neither named nor recovered within {self.args.bar:g} s: {warned}")
        for pid in self.workers():  # every stack, into its log
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        os.kill(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            strike.faults.append("it hangs when it is asked to end")
            self.process.kill()
            self.process.wait()
        self.look_behind(strike.faults)
        return self.start()

    def judge_end(self, strike: RankStrike) -> None:
        said = self.said.read_text()
        code = self.process.returncode
        if code == 0:  # the last step was done already
            strike.outcome = "recovered"
        elif code == 1 and strike.victim in said:
            strike.outcome = "named"
        else:
            strike.outcome = "lost"
            strike.faults.append(f"exit code {code} without its name: {' '.join(said.split())[-600:]}")
        self.look_behind(strike.faults)
        self.start()

    # -- the journal -----------------------------------------------------------------------------------

    def journal(self) -> str:
        path = self.run / "journal.jsonl"
        return path.read_text() if path.is_file() else ""

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal().splitlines() if line.endswith("}")]

    def steps_done(self) -> int:
        return self.journal().count('"kind":"StepDone"')

    def compare(self) -> None:
        """A run that was interrupted with one that was not, bit for bit; and what its journal says."""
        import torch
        from safetensors.torch import load_file

        whole = self.folder / "whole"
        if not whole.exists():
            process, said = start_run(self.changes, whole, uuid.uuid4().hex)
            if process.wait():
                sys.exit(f"the run that nobody interrupted ended: {said.read_text()[-2000:]}")
        last = f"checkpoints/step-{self.args.steps:06}"
        for file in ("model.safetensors", "optimizer.safetensors"):
            paths = [folder / last / file for folder in (whole, self.run)]
            if not all(path.is_file() for path in paths):
                self.faults.append(f"{self.run.name} has no {last}/{file}")
                continue
            a, b = map(load_file, paths)
            if wrong := sorted(a.keys() ^ b.keys()) or [name for name in a if not torch.equal(a[name], b[name])]:
                self.faults.append(f"{self.run.name}: {file} differs in {len(wrong)} tensors, first {wrong[0]}")
        self.faults += [f"{self.run.name}: {fault}" for fault in faults_of(self.run, self.args.steps)]


def faults_of(run: Path, steps: int) -> list[str]:
    """What a journal says that cannot be: of each step once, of each group once, of the ledger's sums."""
    told, found = list(read(run)), []
    done = [e for e in told if e["kind"] == "StepDone"]
    if [e["step"] for e in done] != list(range(1, steps + 1)):
        found.append(f"steps {[e['step'] for e in done]}")
    if wrong := [e["step"] for e in done if 2 * e["ledger"]["issued"] != sum(e["ledger"].values())]:
        found.append(f"the ledger does not balance after steps {wrong}")
    numbers = [n for e in told if e["kind"] == "GroupsTaken" for n in e["numbers"]]
    if len(numbers) != len(set(numbers)):
        found.append("a group was trained twice")
    return found


if __name__ == "__main__":
    main()
