"""Training with ragged micro-batches and with those of a few fixed shapes: how many shapes there are, and what padding costs.

    ragged    trainer.micro_tokens = N
    static    trainer.micro_tokens = { most = N }
    compiled  the same with compile = true (--compile): minutes for each shape on a CPU
    recorded  the same with compile = "record" (--record): CUDA graphs of a GPU

A compiler that knows one shape at a time makes as many programs as there are shapes. Of a ragged pass these are the sizes
of the row, of its targets and of each attention call. Runs alternate, A B A B:

    rondel bench static_shapes --steps 20 --micro 512 --rounds 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def shape_of(packed: Any) -> tuple[Any, ...]:
    """What a compiler of fixed shapes sees of a micro-batch."""
    calls = [(tuple(c.queries.shape), tuple(c.keys.shape)) for c in getattr(packed.layout, "calls", [])]
    return len(packed.tokens), len(packed.target), *sorted(calls)


def run_once(recipe: str, changes: dict[str, Any]) -> dict[str, Any]:
    """One run. -> what its training passes were, and how many seconds of a core those of a step took, in the median."""
    from _work import median

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.core.events import StepDone, subscribe
    from rondel.train.pack import MicroBatches
    from rondel.train.step import LocalTrainer

    done: list[StepDone] = []
    shapes: list[tuple[Any, ...]] = []
    taken: list[float] = []
    plain, plain_step = MicroBatches.__iter__, LocalTrainer._step

    def watched(self: MicroBatches) -> Any:
        for packed in plain(self):
            shapes.append(shape_of(packed))
            yield packed

    def timed(self: LocalTrainer, *args: Any) -> Any:
        began = time.thread_time()
        try:
            return plain_step(self, *args)
        finally:
            taken.append(time.thread_time() - began)

    forget = subscribe(lambda event: done.append(event) if isinstance(event, StepDone) else None)
    MicroBatches.__iter__, LocalTrainer._step = watched, timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            fixed = {"run.folder": folder, "run.sinks": [], "run.checkpoint.every": 0, "task.eval.every": 0}
            train(Job.read(recipe, changes | fixed), quiet=True)
    finally:
        MicroBatches.__iter__, LocalTrainer._step = plain, plain_step  # type: ignore[method-assign]
        forget()
    padding = [e.metrics["train/padding_share"] for e in done if "train/padding_share" in e.metrics]
    return {
        "passes": len(shapes),
        "shapes": len(set(shapes)),
        "train_s": median(taken[1:]),
        "padding": median(padding) if padding else 0.0,
        "compile_s": sum(e.metrics.get("train/compile_s", 0.0) for e in done),
        "graphs": max((e.metrics.get("train/compiled_graphs", 0.0) for e in done), default=0.0),
        "reward": done[-1].metrics.get("score/reward_mean", 0.0),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench static_shapes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="", help="a recipe file; recipes/tiny.toml if not given")
    parser.add_argument("--steps", type=int, default=20, help="of each run; the first is not timed")
    parser.add_argument("--warmup", type=int, default=0, help="supervised steps before them")
    parser.add_argument("--micro", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind, in turn")
    parser.add_argument("--compile", action="store_true", help="a third kind, compiled by torch's inductor")
    parser.add_argument("--record", action="store_true", help="another kind, recorded as CUDA graphs: needs a GPU")
    parser.add_argument("--json", action="store_true")
    from _work import add_set, median, overrides, report

    add_set(parser)
    a = parser.parse_args(argv)

    from rondel.cli.package_files import shipped_folder

    recipe = a.recipe or str((shipped_folder("recipes") or Path("recipes")) / "tiny.toml")
    common = {"loop.steps": a.steps, "loop.warmup.steps": a.warmup, "place.threads": 1}
    kinds: dict[str, Any] = {"ragged": a.micro, "static": {"most": a.micro}}
    if a.compile:
        kinds["compiled"] = {"most": a.micro, "compile": True}
    if a.record:
        kinds["recorded"] = {"most": a.micro, "compile": "record"}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(a.rounds):
        for kind, micro in kinds.items():
            found[kind].append(run_once(recipe, overrides(a.set, common | {"trainer.micro_tokens": micro})))
    row: dict[str, Any] = {"bench": "static_shapes", "steps": a.steps, "micro": a.micro, "rounds": a.rounds}
    for kind, runs in found.items():
        last = runs[-1]
        row |= {
            f"{kind}_passes": last["passes"],
            f"{kind}_shapes": last["shapes"],
            f"{kind}_train_s": [round(r["train_s"], 4) for r in runs],
            f"{kind}_median_s": round(median([r["train_s"] for r in runs]), 4),
            f"{kind}_padding": round(last["padding"], 3),
        }
        if last["graphs"]:
            row |= {f"{kind}_graphs": last["graphs"], f"{kind}_made_s": [round(r["compile_s"], 1) for r in runs]}
    report(row, only_json=a.json)


if __name__ == "__main__":
    main()
