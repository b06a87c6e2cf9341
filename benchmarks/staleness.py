"""What stale samples cost: the tiny task from one start a seed, the same steps and samples, with S = 0, 1, 2, 4 and 8.

    rondel bench staleness --seeds 3 --json
The number is the mean reward of the final weights at temperature 1 over `--final` fresh
groups, not of the last steps' samples, which older weights drew. `lag` is the mean of the
second half of the run. Rows: grpo, which believes its samples, and decoupled, which weighs a token by
proximal / behavior. Interval: 95 % of Student's t over the seeds. As many runs at once as there are cores,
each with one thread.

    rondel bench staleness --rows decoupled --bounds 1,2,5,inf,auto --staleness 8 --seeds 5 --json
A run for each `correction.high` of the row. Runs of one seed have the same start and the same judges, so the
differences from the first bound are paired by seed (`difference`). `high` is the median bound of the second half.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, median, report

    parser = argparse.ArgumentParser(
        prog="rondel bench staleness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="grpo,decoupled")
    parser.add_argument(
        "--bounds", default="", help="correction.high of the rows, with commas; the row's own when left out"
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3, choices=[1, 2, 3, 4, 5])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=55)
    parser.add_argument("--warmup", type=int, default=230, help="steps of the supervised start")
    parser.add_argument("--final", type=int, default=128, help="groups that judge the final weights")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    from rows import half, mean

    import rondel.assemble  # noqa: F401  once, before the runs are forked

    ends: dict[str, list[float]] = {}
    lags: dict[str, list[float]] = {}
    highs: dict[str, list[float]] = {}
    rows = [(row, bound) for row in a.rows.split(",") for bound in a.bounds.split(",")]
    seeds = range(a.first_seed, a.first_seed + a.seeds)
    runs = [(seed, row, bound, s) for seed in seeds for row, bound in rows for s in a.staleness]
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(min(len(runs), len(os.sched_getaffinity(0))), get_context("fork")) as pool,
    ):
        list(pool.map(begin, *zip(*[(Path(scratch), seed, a.warmup, a.set) for seed in seeds])))
        results = pool.map(judged, *zip(*[(Path(scratch), *run, a.steps, a.final, a.set) for run in runs]))
        for (seed, row, bound, s), (reward, lag, high) in zip(runs, results):
            name = run_name(row, bound, s)
            ends.setdefault(name, []).append(reward)
            lags.setdefault(name, []).append(lag)
            highs.setdefault(name, []).extend(high)
            print(f"seed {seed} {name:<28} {reward:.3f}   lag {lag:.2f}", file=sys.stderr, flush=True)
    table: dict[str, Any] = {
        name: {"reward": round(mean(values), 3), "plus_minus": half(values), "lag": round(mean(lags[name]), 2), "seeds": [round(v, 3) for v in values]}
        for name, values in ends.items()
    }  # fmt: skip
    for row, bound in rows:
        for s in a.staleness:
            name, first = run_name(row, bound, s), run_name(row, a.bounds.split(",")[0], s)
            if name != first:
                apart = [value - other for value, other in zip(ends[name], ends[first])]
                table[name] |= {"difference": round(mean(apart), 4), "difference_plus_minus": half(apart)}
            if highs[name]:
                table[name]["high"] = round(median(highs[name]), 2)
    if not a.json:
        for name, got in table.items():
            print(f"{name:<28} {got['reward']:.3f} ± {got['plus_minus']}   lag {got['lag']}")
    report({"steps": a.steps, "final_groups": a.final, "rows": table}, only_json=True)


def run_name(row: str, bound: str, s: int) -> str:
    return f"{row}{', high = ' * bool(bound)}{bound}, S = {s}"


def begin(scratch: Path, seed: int, warmup: int, given: list[str]) -> None:
    from rows import train

    train(scratch / str(seed) / "start", seed, {"loop.steps": 0, "loop.warmup.steps": warmup}, given)


def judged(
    scratch: Path, seed: int, row: str, bound: str, s: int, steps: int, final: int, given: list[str]
) -> tuple[float, float, list[float]]:
    """-> (mean reward of the final weights, lag, the bounds that "auto" chose in the second half)"""
    from rows import last, mean, train

    home = scratch / str(seed)
    name = run_name(row, bound, s)
    begun = {"algo.kind": row, "loop.warmup.steps": 0, "model.path": last(home / "start")}
    begun |= {"algo.correction.high": "auto" if bound == "auto" else float(bound)} if bound else {}
    train(home / name, seed, begun | {"loop.steps": steps, "loop.max_staleness": s}, given)
    once = {"loop.warmup.steps": 0, "model.path": last(home / name), "loop.steps": 1}
    curve, _ = train(home / f"{name}, judged", seed + 100, once, [*given, f"loop.groups_per_step={final}"])
    return curve[0], mean(lag_of(home / name)), bounds_of(home / name)


def lag_of(folder: Path) -> list[float]:
    """The mean lag of each step in the second half."""
    from rondel.runtime.journal.log import read

    taken = [e for e in read(folder) if e["kind"] == "GroupsTaken"]
    lags = [sum(e["version"] - born for born in e["born"]) / len(e["born"]) for e in taken]
    return lags[len(lags) // 2 :]


def bounds_of(folder: Path) -> list[float]:
    """`correction.high` of each step in the second half, where it was chosen from the data."""
    from rondel.runtime.journal.log import read

    steps = [e["metrics"] for e in read(folder) if e["kind"] == "StepDone"]
    chosen = [stats["train/correction_high"] for stats in steps if "train/correction_high" in stats]
    return chosen[len(chosen) // 2 :]


if __name__ == "__main__":
    main()
