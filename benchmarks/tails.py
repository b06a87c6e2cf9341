"""What the longest answers cost: one of ten is eight times as long as the others, in
synchronous training and with partial rollouts, in turn.

    rondel bench tails --json

synchronous       every step waits for its longest answer, while the engine's batch runs empty
partial rollout   max_staleness S >= 1 and window "auto": the groups that have ended are trained, the
                  rest goes on under the new weights

`idle` is the part of the engine's places (engine.max_running a decode step) that no answer
fills while the engine generates, a count and not a time; `seconds` is the median over the
rounds of the time of one step, `waits` the trainer's
part of it, first steps left out. `cut` is by how much the idle part falls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
FIRST = 3  # steps that are not counted
PLACES = 64
LONG = 128  # tokens of every tenth answer; the others have an eighth of them


class Mixed:
    """One answer of ten is long, whatever the policy writes: the noise's key decides."""

    async def run(self, task: Any, chat: Any) -> Any:
        longest = chat.sampling.max_tokens
        length = longest if chat.key(0) % 10 == 0 else longest // 8
        chat.sampling = replace(chat.sampling, max_tokens=length, ignore_eos=True)
        chat.give([{"role": "user", "content": str(task.data["prompt"])}])
        await chat.reply()
        return chat.trajectory


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench tails", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    modes = {"synchronous": 0} | {f"partial rollout, S = {s}": s for s in a.staleness}
    told: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    for number in range(a.rounds):
        for name, staleness in modes.items():
            told[name].append(measured(a.steps, staleness, a.set))
            print(f"round {number + 1}, {name}: idle {told[name][-1]['idle']:.0%}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        name: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for name, runs in told.items()
    }
    for name in modes:
        result[name]["cut"] = 1 - result[name]["idle"] / result["synchronous"]["idle"]
    report(result, only_json=a.json)


def measured(steps: int, staleness: int, given: list[str]) -> dict[str, float]:
    """One run on a shared device."""
    from _work import overrides

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.runtime.journal.log import read

    filled: list[int] = []

    def count(parts: Any) -> None:
        step = parts.engine.runner.step
        parts.engine.runner.step = lambda *plans: (filled.append(len(parts.engine.scheduler.running)), step(*plans))[1]

    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "run.folder": folder, "run.sinks": [], "task.eval.every": 0, "place.threads": 1, "run.checkpoint.every": 0, "loop.warmup.steps": 0, "loop.steps": steps,
            "loop.groups_per_step": 16, "algo.group_size": 4, "algo.kind": "reinforce", "task.env": "tails:Mixed",
            "model.path.max_position_embeddings": 512, "task.data.holdout": 0, "engine.sampling": {"max_tokens": LONG}, "engine.max_running": PLACES, "loop.max_staleness": staleness,
        }  # fmt: skip
        if staleness:
            changes["algo.correction"] = {"kind": "importance"}
        train(Job.read(RECIPE, overrides(given, changes)), quiet=True, built=count)
        done = [e for e in read(Path(folder)) if e["kind"] == "StepDone"]
    counted = done[FIRST:]
    return {
        "idle": 1 - sum(filled) / (PLACES * len(filled)),
        "seconds": (counted[-1]["t"] - done[FIRST - 1]["t"]) / len(counted),
        "waits": statistics.median(e["seconds"]["wait"] for e in counted),
    }


if __name__ == "__main__":
    main()
