"""One RL step alone on its cores, and beside a program that keeps one of them busy, in turn within one run.

    rondel bench contention --pairs 5 --json
    rondel bench contention --env GOMP_SPINCOUNT=300000 --env OMP_WAIT_POLICY=passive --json      each in a process of its own

Seconds of each step; `share` is a step beside the neighbour over the mean of the two alone around it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
BUSY = {
    "loop": "while True: pass",
    "torch": "import torch\na = torch.randn(512, 512)\nwhile True: a @ a",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench contention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id, smollm2-135m, or JSON of a random one")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new", type=int, default=32, help="tokens of every answer")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=0, help="0 is what a run takes by itself")
    parser.add_argument("--busy", default="loop", choices=list(BUSY), help="a loop of Python, or products of torch")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the step's process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)

    from _work import median, report

    if a.here:
        print(json.dumps(_alternate(a)))
        return
    rows = []
    for setting in a.env or [""]:
        words = [w for w in sys.argv[1:] if w != "--json"] if argv is None else [w for w in argv if w != "--json"]
        asked = dict([setting.split("=", 1)]) if setting else {}
        script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import contention; contention.main(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", script, *words, "--here"], env={**os.environ, **asked}, stdout=subprocess.PIPE, text=True, check=True
        )  # fmt: skip
        seconds = json.loads(done.stdout.strip().rpartition("\n")[2])
        alone, beside = seconds[0::2], seconds[1::2]
        shares = [b / ((x + y) / 2) for b, x, y in zip(beside, alone, alone[1:])]
        rows.append(
            {
                "env": setting, "share": round(median(shares), 2), "worst_share": round(max(shares), 2), "alone_s": round(median(alone), 3),
                "beside_s": round(median(beside), 3), "alone": [round(s, 3) for s in alone], "beside": [round(s, 3) for s in beside],
            }
        )  # fmt: skip
    report({"bench": "contention", "busy": a.busy, "cases": rows}, only_json=a.json)


def _alternate(a: argparse.Namespace) -> list[float]:
    """Seconds of the steps after the first two: alone, beside, alone, ... alone."""
    from _work import SUFFIX, SUM_TASK

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.core.events import StepDone, subscribe

    seconds: list[float] = []
    neighbours: list[subprocess.Popen[bytes]] = []

    def switch(event: object) -> None:
        if not isinstance(event, StepDone):
            return
        seconds.append(event.seconds["step"])
        while neighbours:
            neighbours[-1].kill()
            neighbours.pop().wait()
        if len(seconds) % 2 and 2 < len(seconds) < 2 * a.pairs + 3:
            neighbours.append(subprocess.Popen([sys.executable, "-c", BUSY[a.busy]]))

    subscribe(switch)
    model = json.loads(a.model) if a.model.startswith("{") else a.model
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": {"path": model, "dtype": a.dtype},
            "task": {"data": SUM_TASK, "reward": "number", "env": {"kind": "single_turn", "suffix": SUFFIX}},
            "algo": {"kind": "grpo", "group_size": a.group},
            "loop": {"steps": 2 * a.pairs + 3, "groups_per_step": a.prompts},
            "engine": {"sampling": {"max_tokens": a.new, "ignore_eos": True}},
            "place": {"threads": a.threads or "auto"},
            "run": {"folder": folder, "checkpoint": {"every": 0}, "sinks": []},
        }
        try:
            train(Job.parse(tree, "rondel bench contention"), quiet=True)
        finally:
            for one in neighbours:
                one.kill()
                one.wait()
    return seconds[2:]


if __name__ == "__main__":
    main()
