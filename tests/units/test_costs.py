"""Costs read from journals: those that a journal was made with come back, and a
simulation at them takes the time that it took.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from rondel.core.errors import DataError
from rondel.simulate import SimulatedWorld, simulate
from rondel.simulate.costs import Timers, costs_of, fit_nonnegative
from rondel.simulate.lengths import recorded_lengths

STEP, REQUEST, READ, FIXED, TRAIN, HOST, ANSWER, SYNC, PAUSE = 2e-3, 5e-5, 1e-4, 0.05, 2e-4, 0.01, 1e-3, 0.03, 0.004
PROMPT, GROUP = 10, 4
WHOLE = {"task": "", "born": 0, "reason": "", "rewards": []}


def journal(folder, groups, steps=12, seed=0, answer=ANSWER):
    """Of a synchronous run in which everything takes exactly so long: all answers of a step are written together."""
    draw, lines = random.Random(seed), []
    for step in range(1, steps + 1):
        lengths = [[draw.randint(5, 60) for _ in range(GROUP)] for _ in range(groups)]
        numbers = [step * groups + i for i in range(groups)]
        lines += [
            {"kind": "GroupFinished", "number": n, "kept": True, "lengths": each, **WHOLE}
            for n, each in zip(numbers, lengths)
        ]
        lines.append(
            {
                "kind": "GroupsTaken",
                "step": step,
                "version": step,
                "numbers": numbers,
                "born": [step] * groups,
                "limit": 0,
            }
        )
        written, longest = sum(map(sum, lengths)), max(map(max, lengths))
        generate = STEP * longest + REQUEST * written + READ * groups * PROMPT
        counts = {"steps": longest, "requests": written, "read": groups * PROMPT}
        lines.append(
            {
                "kind": "WorkerTime",
                "worker": "engine-0",
                "seconds": {"generate": generate, "idle": 1.0},
                "counts": counts,
            }
        )
        lines.append(
            {
                "kind": "Synced",
                "version": step,
                "root": "",
                "bytes_copied": 0,
                "probe_gap": 0.0,
                "paused": PAUSE,
                "seconds": SYNC,
            }
        )
        packed = written + groups * PROMPT
        seconds = {
            "wait": generate + answer * groups * GROUP,
            "prepare": HOST,
            "train": FIXED + TRAIN * packed,
            "sync": SYNC,
        }
        seconds["step"] = sum(seconds.values())
        metrics = {"train/packed_tokens": packed}
        lines.append(
            {"kind": "StepDone", "step": step, "version": step, "seconds": seconds, "metrics": metrics, "ledger": {}}
        )
    folder.mkdir()
    (folder / "journal.jsonl").write_text(
        "".join(json.dumps({"n": n, "t": n, **line}) + "\n" for n, line in enumerate(lines))
    )
    return folder


def test_what_a_journal_was_made_with_comes_back(tmp_path):
    found = costs_of([journal(tmp_path / "few", 2), journal(tmp_path / "many", 16)])
    wanted = {
        "step": STEP,
        "request": REQUEST,
        "prefill": READ,
        "fixed": FIXED + HOST,
        "train": TRAIN,
        "answer": ANSWER,
        "sync": SYNC,
    }
    assert {name: getattr(found, name) for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert (found.pause, found.prompt) == pytest.approx((PAUSE, PROMPT))


def test_updates_that_end_beside_the_next_step_count_where_they_end(tmp_path):
    """Two of them between the same steps, and none between others."""
    path = journal(tmp_path / "run", 4) / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    synced = [line for line in lines if line["kind"] == "Synced"]
    rest = [line for line in lines if line["kind"] != "Synced"]
    done = [n for n, line in enumerate(rest) if line["kind"] == "StepDone"]
    for n, line in reversed(
        list(zip([done[min(i + i % 2, len(done) - 1)] for i in range(len(done))], synced, strict=True))
    ):
        rest.insert(n, line)
    path.write_text("".join(json.dumps(line) + "\n" for line in rest))
    found = costs_of([path.parent])
    assert (found.pause, found.sync) == pytest.approx((PAUSE, SYNC))


def test_where_noise_leaves_a_token_no_time_reading_prompts_has_none(tmp_path):
    """Two steps whose time grows with their prompts alone: the simulator refuses a token of 0 s."""
    path = journal(tmp_path / "run", 2, steps=4) / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for n, line in enumerate(line for line in lines if line["kind"] == "WorkerTime"):
        line["counts"] = {"steps": 4 - n % 2, "requests": 16 - n % 2, "read": 80 + 40 * (n % 2)}
        line["seconds"]["generate"] = line["counts"]["read"] * READ
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    costs = costs_of([path.parent])
    assert costs.prefill == 0 and costs.step + costs.request > READ
    bare = SimulatedWorld(
        engines=1, places=64, beat=[], prefill=0.0, train=0.0, lengths=lambda draw: 4.0, prompts=2, group=GROUP
    )
    assert simulate(costs.with_costs(bare), steps=5)["samples_per_second"] > 0


def test_a_simulation_at_these_costs_takes_that_time(tmp_path):
    # the simulator scores whoever ends early while others are written
    folder = journal(tmp_path / "run", 8, steps=60, answer=0.0)
    run, costs = Timers(folder), costs_of([folder])
    bare = SimulatedWorld(
        engines=1, places=64, beat=[], prefill=0.0, train=0.0, lengths=recorded_lengths(folder), prompts=8, group=GROUP
    )
    told = simulate(costs.with_costs(bare), steps=100)
    assert told["samples_per_second"] == pytest.approx(run.samples / run.seconds, rel=0.02)


def test_an_answer_costs_the_controller_even_where_nothing_else_does():
    """Synchronous: P·G answers, one after the other."""
    world = SimulatedWorld(
        engines=4,
        places=64,
        beat=[1e-3] * 65,
        prefill=0.0,
        train=0.0,
        lengths=lambda draw: 1.0,
        prompts=8,
        group=4,
        fixed=1.0,
        answer=0.25,
    )
    assert simulate(world, steps=5)["step_seconds"] == pytest.approx(1e-3 + 1.0 + 32 * 0.25, rel=1e-6)


def test_least_is_not_negative_where_the_plain_solution_is():
    rows, wanted = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([3.0, 2.0, 1.0])
    assert fit_nonnegative(rows, wanted) == pytest.approx([2.0, 0.0])
    assert fit_nonnegative(rows, rows @ np.array([0.5, 2.0])) == pytest.approx([0.5, 2.0])


def test_a_journal_that_says_too_little_is_named(tmp_path):
    with pytest.raises(DataError, match="too few steps"):
        costs_of([journal(tmp_path / "short", 2, steps=2)])
