"""Number formats of the weights on the tiny task: each trains from the same supervised start, in engine, trainer and
reference alike; nothing is tuned to a format.

    rondel bench formats --seeds 3 --json

reward      mean of the last ten steps, over the seeds
k3          mean nats a token between what the engine drew and the trainer scored, largest of all steps
bits        of one matrix's weight, with its scales
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
        default="bfloat16,float16,fp8,fp8_row,mxfp8,int4,int4_128,mxfp4,nvfp4",
        help="dtypes, and formats over bfloat16",
    )
    parser.add_argument("--seeds", type=int, default=3, choices=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--warmup", type=int, default=230, help="steps of the supervised start")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    from rows import half, last, mean, train

    from rondel.formats import format_of

    names, found = a.formats.split(","), {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(a.seeds):
            home = Path(scratch) / str(seed)
            train(home / "start", seed, {"loop.steps": 0, "loop.warmup.steps": a.warmup}, a.set)
            for name in names:
                chosen = {"model.dtype": name} if name in PLAIN else {"model.dtype": "bfloat16", "model.format": name}
                phases = {"loop.steps": a.steps, "loop.warmup.steps": 0, "model.path": last(home / "start")}
                curve, _ = train(home / name, seed, chosen | phases, a.set)
                found.setdefault(name, []).append(
                    {"first": curve[0], "reward": mean(curve[-10:]), **_steps(home / name)}
                )
                print(f"seed {seed} {name:<10} {curve[0]:.2f} -> {mean(curve[-10:]):.3f}", file=sys.stderr, flush=True)
    table: dict[str, Any] = {}
    for name, runs in found.items():
        bits = PLAIN.get(name) or format_of(name).bits
        table[name] = {
            "first": round(mean([run["first"] for run in runs]), 3),
            "reward": round(mean([run["reward"] for run in runs]), 3),
            "plus_minus": half([run["reward"] for run in runs]),
            "k3": float(f"{max(run['k3'] for run in runs):.2g}"),
            "bits": round(bits, 3),
            "changed": round(mean([run["changed"] for run in runs]), 3),
            "step": round(mean([run["train"] for run in runs]) / mean([run["train"] for run in found[names[0]]]), 2),
        }
        if not a.json:
            print(name, table[name])
    report({"steps": a.steps, "formats": table}, only_json=True)


def _steps(folder: Path) -> dict[str, float]:
    events = map(json.loads, (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines())
    done = [e for e in events if e["kind"] == "StepDone"]
    return {
        "k3": max(e["metrics"].get("train/mismatch_k3_lag_0", 0.0) for e in done),
        "changed": statistics.mean(e["metrics"]["train/weights_changed"] for e in done),
        "train": statistics.median(e["seconds"]["train"] for e in done),
    }


if __name__ == "__main__":
    main()
