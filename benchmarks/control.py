"""How soon a recipe that acts in a world has solved it, and stable-baselines3's PPO beside it, in turn on one machine.

    rondel bench control --seeds 3 --peer /path/of/python/that/has/stable_baselines3
    rondel bench control --recipe recipes/cartpole_model.toml --seeds 3 --at 4000 --without-model

Solved: the mean return of the last 20 training episodes reaches the target. Medians over the seeds, None where a seed
did not get there: actions in the world until then, seconds from the first rollout until then, CPU seconds of the whole
process with its start, and the return of 20 other episodes behind the last step, each action the likeliest. Evaluation
is no part of the seconds. Actions are those in the world itself: with a model of the world those that measured its scales
are among them, and imagined ones are not. With --at N and --at-seconds S, each one number or several, also the mean return
of the last 20 training episodes when N actions were taken, or S seconds over: `returns` has it for each seed, null where a
run ended before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parent.parent
TARGETS = {"CartPole-v1": 475.0, "InvertedPendulum-v5": 950.0}
LAST = 20  # training episodes whose mean is compared with the target


def main(argv: list[str] | None = None) -> None:
    from _work import add_set, median, overrides, report

    from rondel.core.config.job import Job
    from rondel.models.control.kinds import draws_chunks

    parser = argparse.ArgumentParser(
        prog="rondel bench control", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "cartpole.toml"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--target", type=float, default=None, help="a return; unset, that of a world which is known")
    parser.add_argument("--peer", default=None, help="a Python that has stable_baselines3; unset, Rondel runs alone")
    parser.add_argument("--peer-steps", type=int, default=100_000, help="actions that the peer may take")
    parser.add_argument("--at", type=int, nargs="+", default=[], help="actions in the world at which runs are compared")
    parser.add_argument("--at-seconds", type=float, nargs="+", default=[], help="seconds at which runs are compared")
    parser.add_argument("--without-model", action="store_true", help="also the recipe without its model of the world")
    parser.add_argument("--json", action="store_true")
    add_set(parser)
    a = parser.parse_args(argv)
    job = Job.read(a.recipe, overrides(a.set, {}))
    world = str(job.task.data["name"])
    bare = {name: value for name, value in job.task.env_settings.items() if name != "model"}
    without = ["policies={}", f"task.env={json.dumps({'kind': 'control'} | bare).replace(': ', '=')}"]
    if a.without_model and not job.policies:
        parser.error(f"--without-model: {a.recipe} has no model of the world")
    if draws_chunks(job.model.path):
        parser.error(f"--recipe: a token of {a.recipe} is a chunk of actions, and what is counted here is single ones")
    target = TARGETS.get(world) if a.target is None else a.target
    if target is None:
        parser.error(f"--target: which return solves '{world}'?")
    names = ["rondel", *(["without_model"] if a.without_model else []), *(["sb3"] if a.peer else [])]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(a.seeds):
        found["rondel"].append(counted(ours, a.recipe, seed, target, a.set))
        if a.without_model:
            found["without_model"].append(counted(ours, a.recipe, seed, target, [*without, *a.set]))
        if a.peer:
            found["sb3"].append(counted(theirs, a.peer, world, seed, target, a.peer_steps))
    row: dict[str, Any] = {"world": world, "target": target, "seeds": a.seeds}
    for name, runs in found.items():
        for what in ("steps", "seconds", "cpu", "greedy"):
            values = [run[what] for run in runs]
            row[f"{name}_{what}"] = None if None in values else round(median(values), 1)
        row[f"{name}_each"] = [[run["steps"], run["seconds"]] for run in runs]
        for column, bounds, unit in ((0, a.at, "actions"), (1, a.at_seconds, "s")):
            for bound in bounds:
                returns = [mean_return(run["curve"], column, bound) for run in runs]
                row[f"{name}_returns_at_{bound}_{unit}"] = returns
    report(row, only_json=a.json)


def counted(run: Any, *given: Any) -> dict[str, Any]:
    """What a run reports, and the CPU seconds of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told: dict[str, Any] = run(*given)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return told | {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def ours(recipe: str, seed: int, target: float, sets: list[str]) -> dict[str, Any]:
    from _work import overrides

    from rondel.assemble.world_sizes import RANDOM
    from rondel.core.config.job import Job
    from rondel.runtime.journal.log import read
    from rondel.runtime.journal.store import read_step

    with tempfile.TemporaryDirectory() as folder:
        last = Job.read(recipe, overrides(sets, {})).loop.steps
        keys = [f"--loop.seed={seed}", f"--model.path.seed={seed}", f"--task.eval.every={last}", "--run.sinks=[]"]
        keys += [f"--{pair}" for pair in sets]
        argv = [sys.executable, "-m", "rondel", "train", recipe, *keys, f"--run.folder={folder}"]
        ended = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if ended.returncode:
            raise SystemExit(ended.stdout[-2000:] + ended.stderr[-2000:])
        events, episodes, curve = list(read(Path(folder))), list[float](), list[tuple[int, float, float]]()
        began, taken = next(e["t"] for e in events if e["kind"] == "Admitted"), 0
        if Job.read(Path(folder) / "job.toml", {}).policies:
            taken = RANDOM
        for event in (e for e in events if e["kind"] == "StepDone"):
            rows = [row for row in read_step(folder, event["step"]) if not row["agent"]]
            taken += sum(sum(row["mask"]) for row in rows)
            episodes += [row["reward"] for row in rows if row["reward"] is not None]
            curve.append((taken, event["t"] - began, sum(episodes[-LAST:]) / len(episodes[-LAST:])))
        greedy = [e["score"] for e in events if e["kind"] == "Evaluated"][-1:]
        told = reached(curve, target, len(episodes) >= LAST)
        return told | {"greedy": greedy[0] if greedy else None, "curve": curve}


def theirs(python: str, world: str, seed: int, target: float, steps: int) -> dict[str, Any]:
    peer = Path(__file__).parent / "peers" / "sb3_ppo.py"
    argv = [python, str(peer), "--world", world, "--seed", str(seed), "--target", str(target), "--steps", str(steps)]
    told = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if told.returncode:
        raise SystemExit(told.stdout[-2000:] + told.stderr[-2000:])
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def mean_return(curve: Sequence[Sequence[float]], column: int, bound: float) -> float | None:
    """The mean of the last episodes where a column of the curve, (actions, seconds, mean return), first is at the bound."""
    return next((round(point[2], 1) for point in curve if point[column] >= bound), None)


def reached(curve: list[tuple[int, float, float]], target: float, enough: bool) -> dict[str, Any]:
    """Where the mean of the last episodes first reaches the target."""
    steps, seconds = next(((n, t) for n, t, mean in curve if enough and mean >= target), (None, None))
    return {"steps": steps, "seconds": None if seconds is None else round(seconds, 1)}


if __name__ == "__main__":
    main()
