"""What the simulator says of a run beside the run itself: engine and trainer in processes of
their own, a core each, answers of unequal length.

    rondel bench simulated --rounds 3 --json

real        samples a second of the run, first steps left out
simulated   of the loop on a virtual clock, with lengths and costs from journals: `ahead` with the
            costs of synchronous runs of two sizes, as somebody has them who wants to know what
            staleness would bring; `after` with
            the run's own, which says whether the simulator's order of events is the run's,
            whatever else the machine had to do meanwhile

`ratio` is simulated / real, over all rounds together. `load` is the machine's load average at
the end: above the number of cores, `ahead` compares two different machines.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
FIRST = 2  # steps that are not counted, beside those that fill the buffer
MEAN, SIGMA = 32, 0.8
SIMULATED = 200  # steps


class Ragged:
    """Log-normal lengths, whatever the policy writes: the noise's key decides."""

    async def run(self, task: Any, chat: Any) -> Any:
        drawn = NormalDist().inv_cdf(max(1e-6, chat.key(0) % 1_000_003 / 1_000_003))
        length = max(1, round(MEAN * 2.718281828 ** (SIGMA * drawn - SIGMA**2 / 2)))
        chat.sampling = replace(chat.sampling, max_tokens=min(length, chat.sampling.max_tokens), ignore_eos=True)
        chat.give([{"role": "user", "content": str(task.data["prompt"])}])
        await chat.reply()
        return chat.trajectory


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, report

    parser = argparse.ArgumentParser(
        prog="rondel bench simulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="that are counted")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument(
        "--groups", type=int, default=8, help="a step, and a quarter of it in the second synchronous run"
    )
    parser.add_argument("--tokens", type=int, default=128, help="at most, of an answer")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)

    from rondel.simulate.costs import costs_of

    works = {"few": (0, max(1, a.groups // 4))} | {f"S = {s}": (s, a.groups) for s in {0, *a.staleness}}
    folders: dict[str, list[str]] = {name: [] for name in works}
    with tempfile.TemporaryDirectory() as home:
        for number in range(a.rounds):
            for name, (staleness, groups) in works.items():
                folders[name].append(f"{home}/{name}-{number}")
                real(a, folders[name][-1], staleness, groups)
                print(f"round {number + 1}, {name}", file=sys.stderr, flush=True)
        ahead = costs_of([*folders["few"], *folders["S = 0"]], first=FIRST)
        told: dict[str, Any] = {"bench": "simulated"}
        for name in (f"S = {s}" for s in a.staleness):
            told[name] = compared(folders[name], *works[name], ahead)
    told["costs"] = {what: float(f"{value:.3g}") for what, value in vars(ahead).items()}
    told["load"] = round(os.getloadavg()[0], 1)
    told["within 15 %"] = {
        which: all(abs(told[f"S = {s}"]["ratio"][which] - 1) <= 0.15 for s in a.staleness)
        for which in ("ahead", "after")
    }
    report(told, only_json=a.json)


def real(a: argparse.Namespace, folder: str, staleness: int, groups: int) -> None:
    from _work import overrides

    from rondel.assemble import train
    from rondel.core.config.job import Job

    changes: dict[str, Any] = {
        "run.folder": folder, "run.sinks": [], "task.eval.every": 0, "run.checkpoint.every": 0, "loop.warmup.steps": 0, "loop.steps": a.steps + FIRST + staleness,
        "loop.groups_per_step": groups, "loop.max_staleness": staleness, "algo.group_size": 8, "algo.kind": "reinforce",
        "task.env": "simulated:Ragged", "task.eval.n": 1, "model.path.hidden_size": a.hidden, "model.path.intermediate_size": 2 * a.hidden,
        "model.path.num_hidden_layers": 4, "model.path.max_position_embeddings": a.tokens + 64, "engine.sampling": {"max_tokens": a.tokens},
        "engine.max_running": 512, "place.kind": "split",
    }  # fmt: skip
    if staleness:
        changes["algo.correction"] = {"kind": "importance"}
    train(Job.read(RECIPE, overrides(a.set, changes)), quiet=True)


def compared(folders: list[str], staleness: int, groups: int, ahead: Any) -> dict[str, Any]:
    from rondel.simulate import SimulatedWorld, simulate
    from rondel.simulate.costs import Timers, costs_of
    from rondel.simulate.lengths import recorded_lengths

    first = FIRST + staleness
    seen = [Timers(folder, first) for folder in folders]
    rate = sum(run.samples for run in seen) / sum(run.seconds for run in seen)
    bare = SimulatedWorld(
        engines=1,
        places=512,
        beat=[],
        prefill=0.0,
        train=0.0,
        lengths=recorded_lengths(*folders),
        prompts=groups,
        group=8,
        staleness=staleness,
    )
    said = {
        which: simulate(costs.with_costs(bare), steps=SIMULATED)
        for which, costs in (("ahead", ahead), ("after", costs_of(folders, first=first)))
    }
    return {
        "real": round(rate, 2),
        "simulated": {which: round(each["samples_per_second"], 2) for which, each in said.items()},
        "ratio": {which: round(each["samples_per_second"] / rate, 3) for which, each in said.items()},
        "trainer_idle": {which: round(each["trainer_idle"], 3) for which, each in said.items()},
    }


if __name__ == "__main__":
    main()
