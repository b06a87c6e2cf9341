"""What runs of a flow have learned, from their stored points: means over the first and the last steps of RL.

    rondel bench flows runs/flow runs/other --json

reward     of a point
spread     how far the points of a group lie from their mean, the root of the mean square
own        share of points whose nearest data point is one of their own prompt (where there are several prompts)
distinct   data points that are nearest to some point, by the number of points of a step
away       distance to the nearest data point
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    from _work import report

    parser = argparse.ArgumentParser(
        prog="rondel bench flows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders of runs on points that Rondel knows by name")
    parser.add_argument("--steps", type=int, default=10, help="first and last ones of RL")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)
    report({run: learned(run, a.steps) for run in a.runs}, only_json=a.json)


def learned(run: str, steps: int) -> dict[str, Any]:
    from rondel.runtime.journal.store import read_step, stored_steps
    from rondel.runtime.telemetry.drawn_images import last_point

    told = []
    for step in stored_steps(run):
        rows = [row for row in read_step(run, step) if last_point(row) is not None]  # demonstrations end nowhere
        if rows:
            told.append(of_step(rows))
    return {
        name: [
            round(float(np.mean([step[name] for step in part])), 3) for part in (told[:1], told[:steps], told[-steps:])
        ]
        for name in told[0]
    } | {"steps": len(told)}


def of_step(rows: list[dict[str, Any]]) -> dict[str, float]:
    from rondel.cli.point_coverage import nearest_of
    from rondel.generate.envs.points import find_points
    from rondel.runtime.telemetry.drawn_images import last_point

    points = np.stack([last_point(row) for row in rows])
    groups = np.array([row["group"] for row in rows])
    spreads = [np.sqrt(points[groups == group].var(0).sum()) for group in np.unique(groups)]
    told = rows[0]["task_data"]["points"]
    known = find_points(told["name"], told["args"])
    prompts, data = np.repeat(list(known), [len(own) for own in known.values()]), np.concatenate(list(known.values()))
    nearest = nearest_of(points, data)
    return {
        "reward": float(np.mean([row["reward"] for row in rows])),
        "spread": float(np.mean(spreads)),
        "own": float(np.mean([prompts[at] == row["task_data"]["prompt"] for at, row in zip(nearest, rows)])),
        "distinct": len(set(nearest.tolist())) / len(rows),
        "away": float(np.linalg.norm(points - data[nearest], axis=1).mean()),
    }


if __name__ == "__main__":
    main()
