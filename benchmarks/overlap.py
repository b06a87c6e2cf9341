"""What asynchrony is worth: the same recipe synchronous on a shared device, synchronous and stale on two cores that engine and trainer have
each for itself, in turn.

    rondel bench overlap --rounds 3 --json

shared        engine and trainer on both cores, one after the other: what a laptop does
split, S = 0  one core each, and each waits for the other
split, S > 0  one core each, and both work

`seconds` is the median over the rounds of the time of one step, first steps left out. `generate` and `train` are the two halves of a
synchronous split step: they bound what overlapping can give, (generate + train) / max of both. `pause` is how long the engine stood still
for an update.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
FIRST = 3  # steps that are not counted


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="of every answer: how much of a step is generation")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import report

    modes = {
        "shared": {},
        "split, S = 0": {"place.kind": "split"},
        f"split, S = {a.staleness}": {
            "place.kind": "split",
            "loop.max_staleness": a.staleness,
            "algo.correction": {"kind": "importance"},
        },
    }
    told: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    for number in range(a.rounds):
        for name, changes in modes.items():
            told[name].append(measured(a, changes))
            print(f"round {number + 1}, {name}: {told[name][-1]['seconds']:.3f} s a step", file=sys.stderr, flush=True)
    result: dict[str, Any] = {name: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for name, runs in told.items()}
    base, stale = result["split, S = 0"], result[f"split, S = {a.staleness}"]
    result["faster than split, S = 0"] = statistics.median(
        x["seconds"] / y["seconds"] for x, y in zip(told["split, S = 0"], told[f"split, S = {a.staleness}"])
    )
    result["faster than shared"] = result["shared"]["seconds"] / stale["seconds"]
    result["at most"] = (base["generate"] + base["train"]) / max(base["generate"], base["train"])
    report(result, only_json=a.json)


def measured(a: argparse.Namespace, changes: dict[str, Any]) -> dict[str, float]:
    """One run. -> seconds of a step, its halves, and the pause of an update."""
    from rondel.assemble import train
    from rondel.runtime.journal.log import read
    from rondel.words.config import Job

    with tempfile.TemporaryDirectory() as folder:
        fixed = {
            "run.folder": folder, "run.sinks": [], "run.checkpoint.every": 0, "loop.warmup.steps": 0, "loop.steps": a.steps,
            "loop.groups_per_step": 8, "algo.group_size": 8, "algo.kind": "reinforce", "task.eval.n": 1,
            "model.path.hidden_size": a.hidden, "model.path.intermediate_size": 2 * a.hidden, "model.path.num_hidden_layers": 4,
            "engine.sampling": {"max_tokens": a.tokens, "ignore_eos": True}, "engine.max_running": 256,
        }  # fmt: skip
        train(Job.read(RECIPE, {**fixed, **changes}), quiet=True)
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
