"""Journals of runs that never were: a healthy one, and what one fault makes of it.
Real events through the real journal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tomli_w

from rondel.core import events as words
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.runtime.journal.log import Journal
from rondel.runtime.telemetry.reward_hacking import from_scored

JOB: dict[str, Any] = {
    "algo": {"group_size": 4}, "loop": {"steps": 24, "max_staleness": 0}, "engine": {"sampling": {"max_tokens": 128}},
    "trainer": {"lr": 1e-5, "clip": 1.0}, "place": {"kind": "shared"}, "run": {"checkpoint": {"every": 10}},
}  # fmt: skip
FACTS = {"needs": [], "corrects": False, "tasks": {"train": 500, "held_out": 50, "duplicates": 0, "leaked": 0}}
Numbers = Callable[[int, random.Random], dict[str, float]]


def healthy(step: int, rng: random.Random) -> dict[str, float]:
    return {
        "train/entropy": 1.2 - 0.01 * step + rng.gauss(0, 0.05),
        "train/grad_norm": 0.5 * rng.lognormvariate(0, 0.3),
        "train/weights_changed": 1.0,
        "train/lr": 1e-5,
        "train/kl_to_start": 0.002 * step + abs(rng.gauss(0, 0.002)),
        "train/clip_fraction": abs(rng.gauss(0.02, 0.01)),
        "train/mismatch_k3_lag_0": 1e-6 * rng.lognormvariate(0, 0.5),
        "train/mismatch_ess_token": 0.99,
        "train/correction_dropped": 0.0,
    }


def chances(step: int, rng: random.Random) -> list[float]:
    """How often each of four tasks is solved."""
    return [min(0.95, rng.uniform(0.15, 0.75) + 0.008 * step) for _ in range(4)]


def group_of(rewards: list[float], lengths: list[int]) -> Group:
    """Answers of such rewards and lengths, no token of which repeats."""
    answers = [Trajectory(score=Score(reward)) for reward in rewards]
    for answer, n in zip(answers, lengths):
        answer.extend(list(range(n)), logprobs=[-1.0] * n, versions=[0] * n)
    return Group(0, Task("t", "x", {}), answers, 0)


def write(
    folder: Path,
    *,
    steps: int = 24,
    seed: int = 0,
    metrics: Numbers = lambda step, rng: {},
    rewards: Callable[[int, random.Random], list[list[float]]] | None = None,
    lengths: Callable[[int, random.Random, list[float]], list[int]] = lambda step, rng, r: [
        max(8, round(rng.gauss(60, 15))) for _ in r
    ],
    finished: Callable[[int], dict[str, Any]] = lambda step: {},
    seconds: dict[str, float] | None = None,
    workers: Callable[[int], Iterable[words.Event]] = lambda step: (),
    beside: Callable[[int], Iterable[words.Event]] = lambda step: (),
    note: Callable[[int], str] = lambda step: "",
    ledger: Callable[[int], dict[str, int]] = lambda step: {},
    lag: int = 0,
    job: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    last: words.Event | str | None = "ended",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tree = json.loads(json.dumps(JOB))
    for dotted, value in (job or {}).items():
        section, _, leaf = dotted.rpartition(".")
        node = tree
        for name in section.split("."):
            node = node.setdefault(name, {})
        node[leaf] = value
    (folder / "job.toml").write_text(tomli_w.dumps(tree))
    rng, journal, number = random.Random(seed), Journal(folder), 0
    journal.write(words.RunStarted(str(folder), "h", FACTS | (facts or {})))
    for step in range(1, steps + 1):
        groups = (
            rewards(step, rng) if rewards else [[float(rng.random() < p) for _ in range(4)] for p in chances(step, rng)]
        )  # of four answers
        taken, drawn = [], []
        for given in groups:
            long = lengths(step, rng, given)
            told = {"kept": True, "reason": "", "truncated": 0, **finished(step)}
            journal.write(words.Admitted(number, f"t/{number}", step - 1))
            journal.write(words.GroupFinished(number, f"t/{number}", step - 1, rewards=given, lengths=long, **told))
            taken.append(SimpleNamespace(id=number, born=step - 1 - lag))
            drawn.append(group_of(given, long))
            number += 1
        journal.write(words.GroupsTaken(step, step - 1, taken, tree["loop"]["max_staleness"]))
        for event in workers(step):
            journal.write(event)
        journal.write(words.Synced(step, "abc", 0.1, 0, 1e-7))
        phases = {"wait": 2.0, "prepare": 0.1, "train": 3.0, "sync": 0.1} | (seconds or {})
        book = {"issued": number, "trained": number, "in_flight": 0} | ledger(step)
        row = healthy(step, rng) | from_scored(drawn) | metrics(step, rng)
        journal.write(words.StepDone(step, step, row, phases | {"step": sum(phases.values())}, book, note(step)))
        every = tree["run"]["checkpoint"]["every"]
        if every and step % every == 0:
            journal.write(words.Checkpointed(step, step, f"checkpoints/step-{step:06d}", 0.2))
        for event in beside(step):
            journal.write(event)
    if last:
        journal.write(words.RunEnded(steps, steps, "all steps done", 130.0) if last == "ended" else last)
    journal.close()
    return folder


def evaluated(step: int, score: float, n: int = 200) -> words.Evaluated:
    half = 1.96 * (score * (1 - score) / n) ** 0.5
    return words.Evaluated(step, step, "held_out", score, score - half, score + half, n, {})


def at(step: int, *events: words.Event) -> Callable[[int], Iterable[words.Event]]:
    """These after this step."""
    return lambda now: events if now == step else ()


# -- one fault each: what is changed, and the findings that must come of it, the first one
# above all ---------------------------------


def unanimous(value: float) -> Callable[[int, random.Random], list[list[float]]]:
    """Once in a while one answer differs."""
    return lambda step, rng: [
        [1.0 - value if step == 2 and not g and not i else value for i in range(4)] for g in range(4)
    ]


def solved_by(chance: Callable[[int], float]) -> Callable[[int, random.Random], list[list[float]]]:
    return lambda step, rng: [[float(rng.random() < chance(step)) for _ in range(4)] for _ in range(4)]


def paid_by_length(step: int, rng: random.Random) -> list[list[float]]:
    return [[min(1.0, max(0.0, rng.gauss(0.3 + 0.02 * step, 0.15))) for _ in range(4)] for _ in range(4)]


def as_long_as_paid(step: int, rng: random.Random, rewards: list[float]) -> list[int]:
    return [max(4, round(10 + 6 * step + 100 * r + rng.gauss(0, 8))) for r in rewards]


def engine(step: int, **kinds: float) -> words.WorkerTime:
    counts = {name: kinds.pop(name) for name in ("steps", "tokens", "requests", "room", "retracted") if name in kinds}
    return words.WorkerTime("engine-0", kinds, counts)


SPLIT = {"place.kind": "split", "place.engines": 1, "loop.max_staleness": 1}
AGAIN = "engine-0 ended (signal 9)\nIt is started again (1 of at most 5 times); its requests go on from their tokens"
FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all wrong": (dict(rewards=unanimous(0.0)), {"no_signal"}),
    "nothing is written": (
        dict(lengths=lambda s, rng, r: [0] * len(r), metrics=lambda s, rng: {"train/tokens": 0.0}),
        {"silent"},
    ),
    "all right": (dict(rewards=unanimous(1.0)), {"solved"}),
    "a constant reward": (dict(rewards=lambda step, rng: [[0.5] * 4] * 4), {"no_signal"}),
    "the reward collapses": (dict(rewards=solved_by(lambda s: 0.7 if s <= 12 else 0.15)), {"reward_collapse"}),
    "length is paid": (dict(rewards=paid_by_length, lengths=as_long_as_paid), {"length_bias", "reward_hacking"}),
    "shortness is paid": (
        dict(
            rewards=paid_by_length,
            lengths=lambda s, rng, r: [max(4, round(120 - 100 * x + rng.gauss(0, 8))) for x in r],
        ),
        {"length_bias"},
    ),
    "the learning rate is far too high": (
        dict(
            metrics=lambda s, rng: {
                "train/lr": 0.5,
                "train/entropy": 2.8 if s == 1 else 0.3 + rng.uniform(0, 0.1),
                "train/kl_to_start": 1.8 if s == 1 else 3.5,
            },
            rewards=solved_by(lambda s: 0.5 if s == 1 else 0.02),
            job={"trainer": {"lr": 0.5, "clip": 1.0}},
        ),
        {"diverged", "no_signal"},
    ),
    "entropy collapses": (dict(metrics=lambda s, rng: {"train/entropy": 1.2 * 0.75**s}), {"entropy_collapse"}),
    "entropy explodes": (dict(metrics=lambda s, rng: {"train/entropy": 1.2 + 0.12 * s}), {"entropy_explosion"}),
    "the policy runs away": (dict(metrics=lambda s, rng: {"train/kl_to_start": 0.02 * 1.4**s}), {"kl_runaway"}),
    "gradients explode": (
        dict(metrics=lambda s, rng: {"train/grad_norm": 0.5 if s < 15 else 40.0}),
        {"gradient_explosion"},
    ),
    "gradients are always cut": (
        dict(metrics=lambda s, rng: {"train/grad_norm": rng.uniform(15, 30)}),
        {"clipped_always"},
    ),
    "steps are skipped": (
        dict(note=lambda s: "gradient: its norm is inf over group 3" if s in (9, 10) else ""),
        {"steps_skipped"},
    ),
    "float16 overflows": (
        dict(
            metrics=lambda s, rng: {"train/overflows": float(s % 4 == 0), "train/loss_scale": 1024.0},
            note=lambda s: "overflow: 1 of 1 updates had a gradient beyond float16" if s % 4 == 0 else "",
        ),
        {"loss_scale_overflows"},
    ),
    "lr is 0": (dict(metrics=lambda s, rng: {"train/lr": 0.0, "train/weights_changed": 0.0}), {"weights_still"}),
    "lr is below the resolution": (
        dict(metrics=lambda s, rng: {"train/lr": 1e-9, "train/weights_changed": 1e-5}),
        {"weights_still"},
    ),
    "too many tokens are clipped": (
        dict(metrics=lambda s, rng: {"train/clip_fraction": rng.uniform(0.4, 0.6)}),
        {"clip_fraction"},
    ),
    "engine and trainer disagree": (
        dict(metrics=lambda s, rng: {"train/mismatch_k3_lag_0": 0.02 * rng.lognormvariate(0, 0.3)}),
        {"gap_above_bound"},
    ),
    "the gap grows": (dict(metrics=lambda s, rng: {"train/mismatch_k3_lag_0": 1e-6 * 1.3**s}), {"gap_growing"}),
    "stale without correction": (dict(lag=4, job={"loop.max_staleness": 4}), {"lag_uncorrected"}),
    "too stale to be worth anything": (
        dict(
            lag=4,
            job={"loop.max_staleness": 8},
            facts={"corrects": True},
            metrics=lambda s, rng: {"train/mismatch_ess_token": 0.2},
        ),
        {"stale_rollouts"},
    ),
    "answers are cut": (dict(finished=lambda s: {"truncated": 2}), {"truncation"}),
    "the reward breaks": (
        dict(
            rewards=lambda s, rng: [[1.0, 0.0], [0.0, 1.0]],
            lengths=lambda s, rng, r: [50, 60, 55, 70],
            finished=lambda s: {"failed": 2},
        ),
        {"failing_reward"},
    ),
    "the environment breaks": (dict(ledger=lambda s: {"failed/environment fault": s}), {"failing_groups"}),
    "nearly all is refused": (
        dict(
            finished=lambda s: {"kept": False, "reason": "no signal"},
            ledger=lambda s: {"filtered/no signal": 4 * s, "trained": 0},
        ),
        {"dropped_groups"},
    ),
    "the trainer waits": (
        dict(
            job=SPLIT,
            facts={"corrects": True},
            seconds={"wait": 8.0},
            workers=lambda s: [engine(s, generate=10.0, idle=0.5, held=0.1)],
        ),
        {"starved_trainer"},
    ),
    "the engines wait": (
        dict(
            job=SPLIT,
            facts={"corrects": True},
            seconds={"wait": 0.1, "train": 9.0},
            workers=lambda s: [engine(s, generate=2.0, idle=7.0)],
        ),
        {"starved_engine"},
    ),
    "the cache is short": (
        dict(workers=lambda s: [engine(s, generate=2.0, steps=60, tokens=900, requests=900, room=1200, retracted=40)]),
        {"short_of_pages"},
    ),
    "the batch is nearly empty": (
        dict(
            seconds={"wait": 6.0},
            workers=lambda s: [engine(s, generate=6.0, steps=60, tokens=200, requests=200, room=3840)],
        ),
        {"underfilled_engine"},
    ),
    "sync is slow": (dict(seconds={"sync": 4.0}), {"slow_sync"}),
    "milestones are slow": (dict(seconds={"milestone": 9.0}), {"slow_milestones"}),
    "out of memory": (
        dict(last=words.Broke("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.5 GiB")),
        {"out_of_memory"},
    ),
    "memory is nearly full": (
        dict(facts={"device_bytes": 80 << 30}, workers=lambda s: [words.Resident({"train": 79 << 30}, {"train": {}})]),
        {"memory_near_limit"},
    ),
    "an error": (dict(last=words.Broke("SyncError: the root digest differs")), {"broke"}),
    "killed": (dict(last=None), {"died"}),
    "a wait without end": (
        dict(
            beside=at(12, words.Stalled("the learner waits for rollouts since 600 s", "logs")),
            last=words.Broke("StalledError: …"),
        ),
        {"stalled", "broke"},
    ),
    "an engine dies again and again": (
        dict(beside=lambda s: [words.Warned(AGAIN)] if s in (5, 11, 17) else ()),
        {"restarts"},
    ),
    "nothing is saved": (dict(job={"run.checkpoint.every": 0}, last=None), {"no_checkpoint", "died"}),
    "held out falls, trained rises": (
        dict(
            rewards=solved_by(lambda s: 0.3 + 0.02 * s),
            beside=lambda s: [evaluated(s, {1: 0.3, 8: 0.55, 24: 0.38}[s])] if s in (1, 8, 24) else (),
        ),
        {"overfit"},
    ),
    "training tasks are those of the evaluation": (
        dict(facts={"tasks": {"train": 500, "held_out": 50, "leaked": 70}}),
        {"leaked_tasks"},
    ),
    "tasks are there twice": (
        dict(facts={"tasks": {"train": 500, "held_out": 50, "duplicates": 90}}),
        {"duplicate_tasks"},
    ),
    "two tasks": (dict(facts={"tasks": {"train": 2, "held_out": 50}}), {"few_tasks"}),
}
