"""Where the memory of a run is: the peak of each phase and who holds it, beside what `rondel plan` bills.

    rondel bench memory recipes/quickstart.toml --loop.steps=2

The recipe and its overrides are those of `rondel train`; everything is in one process. "live" is what the heap has in
blocks, "held" what of that stays from phase to phase, "mapped" are files: libraries, and weights that a trainer maps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
MB = 1e6


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", metavar="RUN.toml")
    parser.add_argument("--json", action="store_true")
    a, given = parser.parse_known_args(argv)

    from _memory import MemoryTimeline, held_bytes

    from rondel.assemble import train
    from rondel.cli import read_job, setting_of
    from rondel.planner.plan import make_plan
    from rondel.runtime.devices import prepare_process

    prepare_process()  # before the timeline's thread: a thread that allocates first gets a heap of its own
    parts: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        words = [a.recipe, *given, f"--run.folder={folder}/run"]
        job, _ = read_job(*words)
        with MemoryTimeline(lambda: held_bytes(parts[0]) if parts else {}) as timeline:
            train(job, quiet=True, built=parts.append)
    bill = make_plan(setting_of(words))["memory"][0]
    rows = timeline.rows()
    peak = max(row["resident"] for row in rows.values())
    told = {"bench": "memory", "peak": peak, "planned": bill["peak"], "before": timeline.before, "phases": rows}
    if a.json:
        print(json.dumps(told))
    else:
        print_rows(told)


def print_rows(told: dict[str, Any]) -> None:
    for phase, row in told["phases"].items():
        held = ", ".join(f"{name} {n / MB:.0f}" for name, n in sorted(row["held"].items(), key=lambda kv: -kv[1]) if n)
        print(
            f"{phase:14} {row['seconds']:6.1f} s  {row['resident'] / MB:6.0f} MB: mapped {row['mapped'] / MB:.0f}, "
            f"live {row.get('used', 0) / MB:.0f}, freed {row.get('free', 0) / MB:.0f}; held {held}"
        )
    print(f"\npeak {told['peak'] / MB:.0f} MB, planned {told['planned'] / MB:.0f} MB")


if __name__ == "__main__":
    main()
