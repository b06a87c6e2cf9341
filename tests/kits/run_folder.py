"""A run folder without a model: events as a real run would emit them, through the real journal, store and sinks."""

from __future__ import annotations

import math
import random
from pathlib import Path

from rondel.core.events import (
    Admitted,
    Checkpointed,
    Evaluated,
    GroupFinished,
    GroupsTaken,
    Resumed,
    RunEnded,
    RunStarted,
    StepDone,
    Synced,
    Warned,
)
from rondel.core.types import Failed, Group, Score, Task, Trajectory
from rondel.runtime.journal.log import Journal
from rondel.runtime.journal.store import RolloutStore, annotate_step

JOB = """[model]
path = "smollm2-135m"
[task]
env = "single_turn"
[algo]
kind = "dr_grpo"
group_size = 4
[loop]
steps = 6
groups_per_step = 2
updates_per_step = 1
max_staleness = 0
[engine]
kind = "builtin"
sampling = { temperature = 1.0, max_tokens = 16 }
[place]
kind = "shared"
"""
FACTS = {
    "versions": {"rondel": "0.1.0", "torch": "2.13.0"},
    "device": "cpu",
    "dtypes": {"master": "float32", "compute": "float32"},
    "threads": 2,
}


def trajectory(rng: random.Random, version: int, reward: float | None, length: int = 8) -> Trajectory:
    t = Trajectory(
        score=Failed("timeout", "10 s") if reward is None else Score(reward, {"correct": reward}),
        text=f"the <b>sum</b> is {reward}",
    )
    t.extend([rng.randrange(1000) for _ in range(5)])
    t.extend(
        [rng.randrange(1000) for _ in range(length)],
        logprobs=[-float(rng.randrange(1, 64)) / 16 for _ in range(length)],
        versions=[version] * length,
    )
    return t


def group(number: int, version: int, rewards: list[float | None], length: int = 8) -> Group:
    rng = random.Random(number)
    task = Task(f"sum/{number}", "single_turn", {"prompt": f"{number} + 4 = <script>", "answer": str(number + 4)})
    return Group(number, task, [trajectory(rng, version, r, length) for r in rewards], version)


def finished(g: Group) -> GroupFinished:
    failed = sum(isinstance(t.score, Failed) for t in g.trajectories)
    return GroupFinished(g.id, g.task.id, g.born, True, "", g.rewards, [t.written for t in g.trajectories], failed, 0)


def evaluated(step: int, version: int, score: float, scale: float = 1.0) -> Evaluated:
    """Of rewards in [0, scale]."""
    sample = {"prompt": "3 + 4 =", "text": "The answer is `7`.", "answer": "7", "reward": 1.0}
    score, low, high = score * scale, (score - 0.1) * scale, (score + 0.1) * scale
    return Evaluated(step, version, "greedy", score, low, high, 48, {"temperature": 0.0}, [sample], 2.5, {}, 0.0, scale)


def step_events(step: int) -> list:
    """Two groups, trained at version step - 1, then synced to version step."""
    groups = [group(2 * step - 2 + i, step - 1, [1.0, 0.0, None, step / 10]) for i in range(2)]
    return [
        *(Admitted(g.id, g.task.id, g.born) for g in groups),
        *map(finished, groups),
        GroupsTaken(step, step - 1, groups),
        Synced(step, "abc", 0.01, 0, 1e-7),
        *([Checkpointed(step, step, f"checkpoints/step-{step:06d}", 0.2)] if step % 2 == 0 else []),
        StepDone(
            step,
            step,
            {"train/entropy": 1.0, "train/gap_max": 2e-6, "train/loss": math.nan},
            {"wait": 2.0, "train": 1.5, "sync": 0.5, "step": 4.0},
            {"issued": 2 * step, "trained": 2 * step, "in_flight": 0},
        ),
    ]


def write_run(folder: Path, steps: int = 4, crash_after: int = 0, scale: float = 1.0) -> Path:
    """A finished run. `crash_after` = 3 adds a first life that got to step 3 and was
    resumed at its checkpoint of step 2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(JOB)
    store, journal = RolloutStore(folder), Journal(folder)
    events = [RunStarted(str(folder), "h", FACTS), evaluated(0, 0, 0.2, scale)]
    if crash_after:
        saved = crash_after // 2 * 2
        for step in range(1, crash_after + 1):
            events += step_events(step)
        again = Resumed(saved, saved, f"checkpoints/step-{saved:06d}") if saved else Resumed(0, 0, "")
        events += [Warned("slow disk"), RunStarted(str(folder), "h", FACTS), again]
        events += [] if saved else [evaluated(0, 0, 0.2)]
    for step in range(crash_after // 2 * 2 + 1, steps + 1):
        events += step_events(step)
    events += [evaluated(steps, steps, 0.6, scale), RunEnded(steps, steps, "complete", 20.0)]
    for event in events:
        store.write(event)
        journal.write(event)
    journal.close()
    store.close()
    annotate_step(folder, steps, trainer_logprobs={(2 * steps - 2, 0): [-1.0] * 13})
    return folder
