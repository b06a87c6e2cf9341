"""What asynchrony is worth: the same recipe synchronous on a shared device, synchronous and
stale on two cores that engine and trainer have each for itself, in turn.

    rondel bench overlap --rounds 3 --json

shared        engine and trainer on both cores, one after the other: what a laptop does
split, S = 0  one core each, and each waits for the other
  and busy    the same, and whichever core would stand still trains a model of this size for
              nobody, at the lowest priority there is
split, S > 0  one core each, and both work

`seconds` is the median over the rounds of the time of one step, first steps left out.
`generate` and `train` are the two halves of a synchronous split step: they bound what
overlapping can give, (generate + train) / max of
both. `pause` is how long the engine stood still for an update. `of min(R, T)` is the rate of
S > 0 over that of the slower half (generation,
or training and update), with R and T measured alone and, the same, while the other core
is busy too: cores of one machine share its
memory and its clock, pools of a cluster do not. `slowed` is by how much a core slows down
because the other one works, for a sum in registers
and for one over more memory than the caches hold: it tells which of the two it is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
FIRST = 3  # steps that are not counted


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="of every answer: how much of a step is generation")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--clock", type=float, default=1.0, help="seconds of each measurement of a core")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    modes = {
        "shared": {},
        "split, S = 0": {"place.kind": "split"},
        f"split, S = {a.staleness}": {
            "place.kind": "split",
            "loop.max_staleness": a.staleness,
            "algo.correction": {"kind": "importance"},
        },
    }
    modes["split, S = 0, and busy"] = modes["split, S = 0"]
    told: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    for number in range(a.rounds):
        for name, changes in modes.items():
            with neighbours(a.hidden) if "busy" in name else nullcontext():
                told[name].append(measured(a, changes))
            print(f"round {number + 1}, {name}: {told[name][-1]['seconds']:.3f} s a step", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        name: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for name, runs in told.items()
    }
    base, stale = result["split, S = 0"], result[f"split, S = {a.staleness}"]
    result["faster than split, S = 0"] = statistics.median(
        x["seconds"] / y["seconds"] for x, y in zip(told["split, S = 0"], told[f"split, S = {a.staleness}"])
    )
    result["faster than shared"] = result["shared"]["seconds"] / stale["seconds"]
    result["at most"] = (base["generate"] + base["train"]) / max(base["generate"], base["train"])
    for name, halves in ("alone", base), ("beside a busy core", result["split, S = 0, and busy"]):
        result[f"of min(R, T), {name}"] = max(halves["generate"], halves["train"] + halves["sync"]) / stale["seconds"]
    result["slowed"] = slowed(a.rounds, a.clock)
    report(result, only_json=a.json)


@contextmanager
def neighbours(hidden: int) -> Iterator[None]:
    """On every core a process that gets what nobody else wants of it."""
    work = [sys.executable, "-c", BUSY, str(hidden)]
    others = [subprocess.Popen([*work, str(core)]) for core in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


BUSY = """
import os, sys
hidden, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
import torch
torch.set_num_threads(1)
layers = [torch.nn.Linear(hidden, hidden) for _ in range(28)]  # seven matrices in each of four layers
model = torch.nn.Sequential(*layers)
adam = torch.optim.AdamW(model.parameters())
x = torch.randn(1024, hidden)
while os.getppid() != 1:
    adam.zero_grad()
    model(x).square().mean().backward()
    adam.step()
"""


def slowed(pairs: int, seconds: float) -> dict[str, float]:
    """Time on the last core while the first one does the same, over its time alone; the median of so many pairs."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    answers: dict[str, list[float]] = {"registers": [], "memory": []}
    for _ in range(pairs):
        for kind, ratios in answers.items():
            alone = clocked(kind, last, seconds)
            with subprocess.Popen(
                [sys.executable, "-c", CLOCKED, kind, str(first), "1e9"], stdout=subprocess.PIPE, text=True
            ) as other:
                assert other.stdout is not None
                other.stdout.readline()  # it is under way
                ratios.append(clocked(kind, last, seconds) / alone)
                other.kill()
    return {kind: statistics.median(ratios) for kind, ratios in answers.items()}


def clocked(kind: str, core: int, seconds: float) -> float:
    return float(
        subprocess.run(
            [sys.executable, "-c", CLOCKED, kind, str(core), str(seconds)], capture_output=True, text=True
        ).stdout.split()[-1]
    )


CLOCKED = """
import os, sys, time
os.environ["OPENBLAS_NUM_THREADS"] = "1"
kind, core, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
import numpy
if kind == "memory":
    big = numpy.ones(32_000_000, dtype="float32")  # 128 MB
    once = lambda: numpy.add(big, 1.0, out=big)
else:
    a = b = numpy.ones((64, 64), dtype="float32")  # 32 KB with the result: what the core itself holds
    once = lambda: [a @ b for _ in range(500)]
for _ in range(3):
    once()
print("ready", flush=True)
times, end = [], time.perf_counter() + seconds
while time.perf_counter() < end:
    began = time.perf_counter()
    once()
    times.append(time.perf_counter() - began)
print(sorted(times)[len(times) // 2])
"""


def measured(a: argparse.Namespace, changes: dict[str, Any]) -> dict[str, float]:
    """One run. -> seconds of a step, its halves, and the pause of an update."""
    from _work import overrides

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.runtime.journal.log import read

    with tempfile.TemporaryDirectory() as folder:
        fixed = {
            "run.folder": folder, "run.sinks": [], "task.eval.every": 0, "run.checkpoint.every": 0, "loop.warmup.steps": 0, "loop.steps": a.steps,
            "loop.groups_per_step": 8, "algo.group_size": 8, "algo.kind": "reinforce", "task.eval.n": 1,
            "model.path.hidden_size": a.hidden, "model.path.intermediate_size": 2 * a.hidden, "model.path.num_hidden_layers": 4,
            "engine.sampling": {"max_tokens": a.tokens, "ignore_eos": True}, "engine.max_running": 256,
        }  # fmt: skip
        train(Job.read(RECIPE, overrides(a.set, {**fixed, **changes})), quiet=True)
        events = list(read(Path(folder)))
    done = [e for e in events if e["kind"] == "StepDone"]
    counted = done[FIRST:]
    pauses = [e["paused"] for e in events if e["kind"] == "Synced"][FIRST:]
    return {
        "seconds": (counted[-1]["t"] - done[FIRST - 1]["t"]) / len(counted),
        "generate": statistics.median(e["seconds"]["wait"] for e in counted),
        "train": statistics.median(e["seconds"]["train"] for e in counted),
        "sync": statistics.median(e["seconds"]["sync"] for e in counted),
        "pause_ms": 1e3 * statistics.median(pauses),
    }


if __name__ == "__main__":
    main()
