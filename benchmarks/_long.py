"""The journal of a long run that never was: as many events as asked for, in seconds, for what must open it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

JOB = """[algo]
kind = "grpo"
group_size = 8
[loop]
steps = {steps}
groups_per_step = 16
max_staleness = 2
[engine]
sampling = {{ max_tokens = 2048 }}
[place]
kind = "split"
[task]
env = "single_turn"
"""
GROUPS, EACH = 16, 38  # groups of a step, and the events that it tells
PATTERNS = 64  # different groups; drawing each anew would take longer than reading it


def write_long(folder: Path, events: int, seed: int = 0) -> Path:
    """EACH lines a step as the journal writes them: admissions, groups, what was taken, three
    workers, the sync, the step; and an evaluation at times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng, steps, n, t = random.Random(seed), max(1, events // EACH), 0, 1.7e9
    (folder / "job.toml").write_text(JOB.format(steps=steps))
    told = [_group(rng) for _ in range(PATTERNS)]
    with (folder / "journal.jsonl").open("w") as file:

        def write(kind: str, rest: str) -> None:
            nonlocal n, t
            file.write(f'{{"n":{n},"t":{t:.3f},"kind":"{kind}",{rest}}}\n')
            n, t = n + 1, t + 0.05

        write(
            "RunStarted", f'"folder":{json.dumps(str(folder))},"config_hash":"h","facts":{{"needs":[],"corrects":true}}'
        )
        for step in range(1, steps + 1):
            base, version = GROUPS * (step - 1), step - 1
            for g in range(base, base + GROUPS):
                write("Admitted", f'"number":{g},"task":"t/{g % 5000}","version":{version}')
            for g in range(base, base + GROUPS):
                write(
                    "GroupFinished",
                    f'"number":{g},"task":"t/{g % 5000}","born":{max(0, version - g % 3)},{told[rng.randrange(PATTERNS)]}',
                )
            born = [max(0, version - g % 3) for g in range(base, base + GROUPS)]
            numbers = list(range(base, base + GROUPS))
            write(
                "GroupsTaken",
                f'"step":{step},"version":{version},"numbers":{json.dumps(numbers)},"born":{json.dumps(born)},"limit":2',
            )
            for worker, seconds in (
                ("engine-0", {"generate": 1.4, "idle": 0.2, "held": 0.1}),
                ("engine-1", {"generate": 1.3, "idle": 0.4}),
            ):
                write(
                    "WorkerTime",
                    f'"worker":"{worker}","seconds":{json.dumps(seconds)},"counts":{{"steps":60.0,"tokens":9000.0}},"laps":[]',
                )
            write(
                "WorkerTime", '"worker":"trainer","seconds":{"step":1.2,"idle":0.4,"publish":0.1},"counts":{},"laps":[]'
            )
            write(
                "Synced",
                f'"version":{step},"root":"abc","seconds":0.11,"bytes_copied":269000000,"probe_gap":1e-6,"paused":0.01',
            )
            write("StepDone", _step(rng, step, steps, base + GROUPS))
            if step % max(1, steps // 20) == 0:
                score = 0.3 + 0.5 * step / steps
                write(
                    "Evaluated",
                    f'"step":{step},"version":{step},"profile":"held_out","score":{score},"low":{score - 0.05},"high":{score + 0.05},'
                    '"n":300,"request":{},"samples":[],"seconds":4.0',
                )
        write("RunEnded", f'"step":{steps},"version":{steps},"reason":"all steps done","seconds":{t - 1.7e9}')
    return folder


def _group(rng: random.Random) -> str:
    rewards = [float(rng.random() < 0.6) for _ in range(8)]
    lengths = [rng.randrange(100, 2048) for _ in rewards]
    told = {
        "kept": True,
        "reason": "",
        "rewards": rewards,
        "lengths": lengths,
        "failed": 0,
        "truncated": rng.randrange(2),
    }
    return json.dumps(told, separators=(",", ":"))[1:-1]


def _step(rng: random.Random, step: int, steps: int, groups: int) -> str:
    done = step / steps
    metrics = {
        "train/entropy": 1.2 - 0.6 * done + rng.gauss(0, 0.03), "train/grad_norm": 0.5 * rng.lognormvariate(0, 0.3), "train/lr": 1e-6,
        "train/kl_to_start": 0.05 * done + abs(rng.gauss(0, 0.002)), "train/gap_mean": 1e-3, "train/gap_max": 0.1 * rng.random(),
        "train/clip_fraction": abs(rng.gauss(0.02, 0.01)), "train/loss": rng.gauss(0, 0.01), "train/weights_changed": 1.0,
        "train/mismatch_k3": 1e-5, "train/mismatch_ess_token": 0.98, "train/tokens": 9000.0 + 100 * math.sin(step),
        **{f"train/mismatch_k3_tenth_{i}": 1e-5 for i in range(1, 11)},
    }  # fmt: skip
    seconds = {"wait": 0.3, "prepare": 0.1, "hand_over": 0.0, "train": 1.2, "sync": 0.11, "step": 1.71}
    ledger = {"issued": groups + 32, "trained": groups, "in_flight": 32}
    return f'"step":{step},"version":{step},"metrics":{json.dumps(metrics)},"seconds":{json.dumps(seconds)},"ledger":{json.dumps(ledger)},"note":""'
