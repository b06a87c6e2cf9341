"""Rows of the table on the tiny task, from the same start and with the same number
of samples; nothing is tuned to a row but the critic of ppo, the sampling of ssd and the entropy bonus of a_star_po.

    rondel bench rows --rows grpo,dr_grpo,dapo,gspo,cispo,rloo,reinforce_pp,ppo,opd --seeds 3 --json
For every seed one supervised phase, then each row for `--steps` steps from its weights.
The number is the mean reward of the last ten steps, averaged over the seeds, with the 95
% interval of Student's t over them. opd
learns from what grpo has reached with the seed. `answers` were drawn in all: a row that drops groups
draws more, for them and for those that were on their way.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
MORE: dict[str, dict[str, Any]] = {
    "a_star_po": {"algo.entropy.coef": 2e-5},  # the recipe's 0.01 beside a gradient of 0.002·A
    "ppo": {"trainer.critic.lr": 3e-3},
    "ssd": {f"engine.sampling.{knob}": value for knob, value in (("temperature", 0.6), ("top_k", 20), ("top_p", 0.95))},
}
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile by number of seeds


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="grpo,dr_grpo,dapo,gspo,cispo,rloo,reinforce_pp,ppo,opd")
    parser.add_argument("--seeds", type=int, default=3, choices=[1, *STUDENT])
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--warmup", type=int, default=230, help="steps of the supervised start")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    rows = a.rows.split(",")
    ends: dict[str, list[float]] = {row: [] for row in rows}
    answers = dict.fromkeys(rows, 0)
    starts: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(a.seeds):
            home = Path(scratch) / str(seed)
            train(home / "start", seed, {"loop.steps": 0, "loop.warmup.steps": a.warmup}, a.set)
            for row in rows:
                changes = {
                    "algo.kind": row,
                    "loop.steps": a.steps,
                    "loop.warmup.steps": 0,
                    "model.path": last(home / "start"),
                    **MORE.get(row, {}),
                }
                if row == "opd":
                    changes |= {"model.teacher": last(home / "grpo")}
                curve, drawn = train(home / row, seed, changes, a.set)
                answers[row] += drawn
                ends[row].append(mean(curve[-10:]))
                if row == rows[0]:
                    starts.append(curve[0])
                print(
                    f"seed {seed} {row:<14} {curve[0]:.2f} -> {ends[row][-1]:.3f}   {drawn:,} answers",
                    file=sys.stderr,
                    flush=True,
                )
    table = {
        row: {
            "reward": round(mean(values), 3),
            "plus_minus": half(values),
            "seeds": [round(v, 3) for v in values],
            "answers": answers[row],
        }
        for row, values in ends.items()
    }
    if not a.json:
        for row, got in table.items():
            print(f"{row:<14} {got['reward']:.3f} ± {got['plus_minus']}   {got['seeds']}   {got['answers']:,} answers")
    report({"steps": a.steps, "start": round(mean(starts), 3), "rows": table}, only_json=True)


def train(
    folder: Path, seed: int, changes: dict[str, Any], given: list[str], recipe: Path = RECIPE
) -> tuple[list[float], int]:
    """One run, changed by what `--set` gave. -> (the mean reward of each of its steps, answers that were drawn)."""
    from _work import overrides

    from rondel.assemble import train as whole
    from rondel.core.config.job import Job

    common = {
        "run.folder": str(folder),
        "run.sinks": [],
        "task.eval.every": 0,
        "place.threads": 1,
        "loop.seed": seed,
        "run.checkpoint.every": 0,
    }
    if recipe == RECIPE:
        common["task.data.holdout"] = 10
    whole(Job.read(recipe, overrides(given, common | changes)), quiet=True)
    curve: list[float] = []
    rewards: list[float] = []
    drawn = 0
    for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "GroupFinished":
            rewards += event["rewards"]
            drawn += len(event["lengths"])
        elif event["kind"] == "StepDone" and rewards:
            curve.append(mean(rewards))
            rewards = []
    return curve, drawn


def last(folder: Path) -> str:
    return str(max((folder / "checkpoints").glob("step-*")))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def half(values: list[float]) -> float | None:
    """Of the interval; unknown with one seed."""
    if len(values) < 2:
        return None
    spread = math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))
    return round(STUDENT[len(values)] * spread / math.sqrt(len(values)), 3)


if __name__ == "__main__":
    main()
