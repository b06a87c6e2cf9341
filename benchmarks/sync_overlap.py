"""New weights delivered beside the trainer's next step, against a trainer that waits: in one run, block by block in turn.

    rondel bench sync_overlap --json
    rondel bench sync_overlap --hidden 1024 --layers 10 --tokens 12 --json

A random model on two cores, one for the trainer and one for the engine, with a staleness of 2. Blocks of steps wait,
overlap, wait, overlap ...; the first step of a block is left out, since an update of the block before may reach into it.

step     seconds of a step, median
waited   seconds that the trainer stood still for an update: publication and, where it waits, delivery
update   seconds from the beginning of the publication until the engine has answered the probe
paused   seconds that the engine stood still for it
wait     seconds that the trainer waited for groups: near 0 where it is the slower one
cpu ...  seconds of processor time of a worker in a step: what a machine with other work on it leaves as it is
idle     share of its time in which the engine had nothing to do
faster   seconds of a step that waits by those of one that does not, median over the pairs of neighbouring blocks
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
MODES = ("waits", "beside")


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench sync_overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24, help="of every answer: how much of a step is generation")
    parser.add_argument("--answers", type=int, default=8, help="to one prompt; 4 prompts a step")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--block", type=int, default=5, help="steps of one block")
    parser.add_argument("--sync", default="ipc", help="sync.kind")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    report(measure(a), only_json=a.json)


def measure(a: argparse.Namespace) -> dict[str, Any]:
    from _work import overrides

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.core.events import StepDone, subscribe
    from rondel.runtime.journal.log import read
    from rondel.sync.update import WeightUpdate

    done = 0
    pids: dict[str, int] = {}
    used: dict[int, dict[str, float]] = {}  # seconds of processor time by the end of a step, by worker

    def mode_of(step: int) -> str:
        return MODES[(step - 1) // a.block % 2]

    class InTurn(WeightUpdate):
        """Some steps wait for their update."""

        @property
        def keeps_snapshots(self) -> bool:
            return super().keeps_snapshots and mode_of(done + 1) == "beside"

    def count(event: Any) -> None:
        nonlocal done
        if isinstance(event, StepDone):
            done = event.step
            used[done] = {name: processor_seconds(pid) for name, pid in pids.items()}

    def opened(parts: Any) -> None:
        pids.update(parts.placed.pids())
        parts.sync.__class__ = InTurn

    with tempfile.TemporaryDirectory() as folder:
        job = Job.read(RECIPE, overrides(a.set, {
            "run.folder": folder, "run.sinks": [], "task.eval.every": 0, "run.checkpoint.every": 0, "loop.warmup.steps": 0,
            "loop.steps": 2 * a.pairs * a.block, "loop.groups_per_step": 4, "algo.group_size": a.answers, "algo.kind": "reinforce",
            "model.path.hidden_size": a.hidden, "model.path.intermediate_size": 3 * a.hidden, "model.path.num_hidden_layers": a.layers,
            "engine.sampling": {"max_tokens": a.tokens, "ignore_eos": True}, "engine.max_running": 96, "place.kind": "split",
            "loop.max_staleness": 2, "algo.correction": {"kind": "importance"}, "sync.kind": a.sync, "place.threads": 1,
        }))  # fmt: skip
        stop = subscribe(count)
        try:
            train(job, quiet=True, built=opened)
        finally:
            stop()
        events = list(read(Path(folder)))
    rows: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in MODES}
    blocks: dict[int, list[float]] = defaultdict(list)
    size, account = 0, defaultdict(float)
    for event in events:
        step = event.get("step", event.get("version", 0))
        counted = step > a.block and (step - 1) % a.block > 0  # the first block warms up
        row = rows[mode_of(step)] if step else defaultdict(list)
        if event["kind"] == "WorkerTime" and event["worker"].startswith("engine"):
            for kind, seconds in event["seconds"].items():
                account[kind] += seconds
        elif event["kind"] == "Synced" and step:
            size = event["bytes_copied"]
            if counted:
                row["update"].append(event["seconds"])
                row["paused"].append(event["paused"])
        elif event["kind"] == "StepDone":
            seconds, told, account = event["seconds"], dict(account), defaultdict(float)
            if counted:
                row["step"].append(seconds["step"])
                blocks[(step - 1) // a.block].append(seconds["step"])
                row["waited"].append(seconds["sync"])
                row["wait"].append(seconds["wait"])
                row["train"].append(seconds["train"])
                for name in pids:
                    row[f"cpu {name}"].append(used[step][name] - used[step - 1][name])
                if told:
                    row["idle"].append(told.get("idle", 0.0) / sum(told.values()))
    result: dict[str, Any] = {
        mode: {name: round(statistics.median(values), 4) for name, values in row.items()} for mode, row in rows.items()
    }
    result["bytes"] = size
    block = {number: statistics.median(steps) for number, steps in blocks.items()}
    ratios = [(block[n], block[n + 1]) if n % 2 == 0 else (block[n + 1], block[n]) for n in block if n + 1 in block]
    result["faster"] = round(statistics.median(waits / beside for waits, beside in ratios), 3)
    return result


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
