"""What `rondel plan` predicts beside what a run measures: bytes of tensors by tenant,
seconds of generation, training and the step.

    rondel plan --calibrate && rondel bench plan --json                        the tiny recipe
    rondel plan --calibrate && rondel bench plan --model smollm2-135m --json   a real model, with
    --lora 16 an adapter of it, with --nf4 over 4 bits

Lengths are taken from the run, for they are the policy's and not the machine's. `ratio` is predicted / measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder, hub id or smollm2-135m; without one the tiny recipe")
    parser.add_argument("--steps", type=int, default=4, help="at least 2; the first is not counted")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0 trains the whole model")
    parser.add_argument("--nf4", action="store_true", help="beside --lora: its base in 4 bits")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import SUFFIX, SUM_TASK, report

    from rondel.core.config.job import Job

    adapter = {"kind": "qlora" if a.nf4 else "lora", "rank": a.lora} if a.lora else {"kind": "off"}
    if a.model:
        tree: dict[str, Any] = {
            "model": {"path": a.model, "adapter": adapter},
            "task": {
                "data": {**SUM_TASK, "holdout": 0},
                "reward": "number",
                "env": {"kind": "single_turn", "suffix": SUFFIX},
            },
            "algo": {"kind": "reinforce", "group_size": a.group},
            "loop": {"steps": a.steps, "groups_per_step": a.groups},
            "engine": {"sampling": {"max_tokens": a.new, "ignore_eos": True}},
            "place": {"threads": a.threads or "auto"},
            "run": {"folder": "", "checkpoint": {"every": 0}, "sinks": []},
        }
        job = Job.parse(tree, "rondel bench plan")
    else:
        job = Job.read(
            RECIPE,
            {
                "loop.steps": a.steps, "loop.warmup.steps": 0, "run.checkpoint.every": 0, "run.sinks": [], "task.eval.every": 0, "task.data.holdout": 0,
                "place.threads": a.threads or "auto", "model.adapter": adapter,
            },
        )  # fmt: skip
    report(compared(job), only_json=a.json)


def compared(job: Any) -> dict[str, Any]:
    from rondel.checks.calibration import measure_run
    from rondel.core.events import Resident, subscribe
    from rondel.planner import cost
    from rondel.planner.memory import memory_bills

    seen: list[Any] = []

    def note(event: Any) -> None:
        if isinstance(event, Resident):
            seen.append(event)

    end = subscribe(note)
    try:
        setting, paced = measure_run(job)
    finally:
        end()
    [bill] = memory_bills(setting)
    held = seen[-1].held["train"]
    names = {"weights": "policy weights", "masters": "masters", "gradients": "gradients", "moments": "moments"}
    memory = {
        name: [round(bill.rows.get(ours, {"train": 0})["train"] / 1e6, 3), round(held[name] / 1e6, 3)]
        for name, ours in names.items()
    }
    planned = sum(pair[0] for pair in memory.values())
    counted = sum(pair[1] for pair in memory.values())
    predicted = {"generate": cost.generation_time(setting).seconds, "train": cost.train_seconds(setting)}
    real = {"generate": paced.generate, "train": paced.train}
    times = {
        name: [round(predicted[name], 3), round(real[name], 3), round(predicted[name] / real[name], 2)] for name in real
    }
    both = sum(predicted.values()), sum(real.values())
    return {
        "bench": "plan",
        "model": setting.shape.name
        + (f", {'QLoRA' if setting.four_bits else 'LoRA'} of rank {setting.rank}" if setting.rank else ""),
        "hardware": setting.hardware.source,
        "memory_mb (predicted, counted)": memory,
        "memory_ratio": round(planned / counted, 3),
        "seconds (predicted, measured, ratio)": times,
        "step_ratio": round(both[0] / both[1], 2),
        "within": {"memory 10 %": abs(planned / counted - 1) <= 0.1, "step 30 %": abs(both[0] / both[1] - 1) <= 0.3},
    }


if __name__ == "__main__":
    main()
