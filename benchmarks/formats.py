"""Number formats of the weights on one task: each trains from the same start, nothing is tuned to a format.

    rondel bench formats --seeds 3 --json
    rondel bench formats --formats bfloat16,fp8,engine:fp8,engine:fp8:uncorrected --seeds 3 --json
    rondel bench formats --recipe recipes/quickstart.toml --warmup 0 --steps 5 --seeds 1 --json

The tiny recipe starts from a supervised phase; with `--warmup 0` a recipe starts from its model as it is.

float32, bfloat16, ...  whole weights              int4, fp8, ...            engine, trainer and reference in the format
engine:fp8              the engine alone, importance weights       engine:fp8:uncorrected    weights that are all 1
engine:fp8:encoded      the same, held as codes and scales

Engine and trainer have a module each in one process, so that every update is counted.

reward      mean of the last ten steps, over the seeds
before      score on held-out tasks with the engine's weights before the first step, over the seeds
held_out    the same behind the last step
k3          mean nats a token between what the engine drew and the trainer scored, largest of all steps
truncated   share of importance weights that the bound held, mean over the steps
bits        of one matrix's weight as it travels, with its scales
sync        bytes of one update
memory      bytes of the engine's weights and of their packed copies
rate        tokens a second of the rollouts, median over the steps, over that of the first format
changed     share of compute weights whose bits a step changed, mean over the steps
step        median seconds of the trainer's part of a step, over that of the first format
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
PLAIN = {"float32": 32, "bfloat16": 16, "float16": 16}


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench formats", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--formats",
        default="bfloat16,float16,fp8,fp8_row,mxfp8,int4,int4_128,mxfp4,nvfp4,engine:fp8,engine:fp8:uncorrected",
        help="dtypes, and formats over bfloat16, of both sides or of the engine alone",
    )
    parser.add_argument("--seeds", type=int, default=3, choices=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--warmup", type=int, default=230, help="steps of the supervised start")
    parser.add_argument("--recipe", type=Path, help="another than the tiny one")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    from rows import RECIPE, last, mean, train

    names, found = a.formats.split(","), {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(a.seeds):
            home = Path(scratch) / str(seed)
            recipe, start = a.recipe or RECIPE, {}
            if a.warmup:
                train(home / "start", seed, {"loop.steps": 0, "loop.warmup.steps": a.warmup}, a.set, recipe)
                start = {"model.path": last(home / "start")}
            for name in names:
                phases = {"loop.steps": a.steps, "loop.warmup.steps": 0, **start}
                apart = {"place.kind": "split", "place.cluster": "local", "task.eval.every": a.steps}
                curve, _ = train(home / name, seed, settings_of(name) | phases | apart, a.set, recipe)
                found.setdefault(name, []).append(
                    {"first": curve[0], "reward": mean(curve[-10:]), **_steps(home / name)}
                )
                print(f"seed {seed} {name:<10} {curve[0]:.2f} -> {mean(curve[-10:]):.3f}", file=sys.stderr, flush=True)
            print(json.dumps(summarize(found)), file=sys.stderr, flush=True)  # of the seeds so far
    table = summarize(found)
    for name, row in table.items() if not a.json else ():
        print(name, row)
    report({"steps": a.steps, "formats": table}, only_json=True)


def summarize(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """A row of the table for each format."""
    from rows import half, mean

    from rondel.formats import format_of

    table: dict[str, Any] = {}
    first = next(iter(found.values()))
    for name, runs in found.items():
        bits = PLAIN.get(name) or format_of(name.removeprefix("engine:").partition(":")[0]).bits
        table[name] = {
            "first": round(mean([run["first"] for run in runs]), 3),
            "reward": round(mean([run["reward"] for run in runs]), 3),
            "plus_minus": half([run["reward"] for run in runs]),
            "before": round(mean([run["before"] for run in runs]), 3),
            "held_out": round(mean([run["held_out"] for run in runs]), 3),
            "held_out_plus_minus": half([run["held_out"] for run in runs]),
            "k3": float(f"{max(run['k3'] for run in runs):.2g}"),
            "truncated": float(f"{mean([run['truncated'] for run in runs]):.2g}"),
            "bits": round(bits, 3),
            "sync": max(int(run["sync"]) for run in runs),
            "memory": max(int(run["memory"]) for run in runs),
            "rate": round(mean([run["rate"] for run in runs]) / mean([run["rate"] for run in first]), 2),
            "changed": round(mean([run["changed"] for run in runs]), 3),
            "step": round(mean([run["train"] for run in runs]) / mean([run["train"] for run in first]), 2),
        }
    return table


def settings_of(name: str) -> dict[str, Any]:
    """Of a recipe, for one entry of --formats."""
    if name in PLAIN:
        return {"model.dtype": name}
    whose, _, rest = name.partition(":")
    if whose != "engine":
        return {"model.dtype": "bfloat16", "model.format": name}
    form, _, how = rest.partition(":")
    held = "encoded" if how == "encoded" else "decoded"
    correction: dict[str, Any] = {"kind": "importance"}
    if how == "uncorrected":  # rejects a sample whose token became e^69 times less likely: none
        correction |= {"level": "none", "veto": 1e-30}
    return {"model.dtype": "bfloat16", "model.format": {"engine": form, "held": held}, "algo.correction": correction}


def _steps(folder: Path) -> dict[str, float]:
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    done = [e for e in events if e["kind"] == "StepDone"]
    rates, drawn = [], 0
    for e in events:
        if e["kind"] == "GroupFinished":
            drawn += sum(e["lengths"])
        elif e["kind"] == "StepDone":
            rates.append(drawn / max(1e-6, e["seconds"]["wait"]))
            drawn = 0
    return {
        "before": next(e["score"] for e in events if e["kind"] == "Evaluated"),
        "held_out": [e["score"] for e in events if e["kind"] == "Evaluated"][-1],
        "truncated": statistics.mean(e["metrics"].get("train/correction_truncated", 0.0) for e in done),
        "sync": max(e["bytes_copied"] for e in events if e["kind"] == "Synced"),
        "memory": max(
            e["memory"]["engine weights"] + e["memory"]["engine packed"]
            for e in events
            if e["kind"] == "WorkerTime" and e["worker"].startswith("engine") and "engine weights" in e["memory"]
        ),
        "rate": statistics.median(rates),
        "k3": max(e["metrics"].get("train/mismatch_k3_lag_0", 0.0) for e in done),
        "changed": statistics.mean(
            e["metrics"].get("train/weights_changed", 0.0) for e in done
        ),  # 0 where float16 overflowed
        "train": statistics.median(e["seconds"]["train"] for e in done),
    }


if __name__ == "__main__":
    main()
