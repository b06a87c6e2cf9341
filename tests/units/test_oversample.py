"""Where more groups are begun than are waited for (laws 1, 2 and 15): what that does to a batch, and whole runs."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from kits.fakes import CountingTrainer, Rollouts, endless, loop_kit
from kits.runs import check, events, run, tiny
from kits.sweeps import covering
from rondel import loop
from rondel.buffer import Buffer
from rondel.core.errors import ConfigError
from rondel.core.events import subscribe
from rondel.core.types import Group, Trajectory
from rondel.runtime.journal import store
from rondel.runtime.telemetry.metrics import LateBias, StepMetrics


def test_a_long_tail_that_goes_on_in_the_next_step_leaves_the_learner_less_to_wait_for():
    """Nine in ten take 6 turns of the event loop, one in ten 30, a step takes 6: with one
    version of room the learner waits 40 % less.
    """

    def waited(**settings) -> int:
        chance, turns, idle, ended = random.Random(1), 0, 0, False

        async def attempt(slot):
            for _ in range(30 if chance.random() < 0.1 else 6):
                await asyncio.sleep(0)
            return Group(slot.number, slot.task, [Trajectory()], slot.born)

        class Slow(CountingTrainer):
            async def step(self, batch, algo):
                for _ in range(6):
                    await asyncio.sleep(0)
                return await super().step(batch, algo)

        buffer = Buffer(groups_per_step=8, **settings)
        take = buffer.take

        async def timed():
            nonlocal idle
            began = turns
            groups = await take()
            idle += turns - began
            return groups

        async def clock():
            nonlocal turns
            while not ended:
                turns += 1
                await asyncio.sleep(0)

        async def main():
            nonlocal ended
            ticking = asyncio.create_task(clock())
            await loop.run(endless(), buffer, **{**loop_kit(Slow(), Rollouts(0), 60), "attempt": attempt})
            ended = True
            await ticking

        buffer.take = timed
        asyncio.run(main())
        return idle

    synchronous, partial = waited(), waited(max_staleness=1)
    assert partial < 0.6 * synchronous, (partial, synchronous)


# -- whole runs --------------------------------------------------------------------------------------

LONG = {
    "loop__warmup__steps": 0, "trainer__lr": 0.0, "task__reward": "kits.rewards:short", "algo__group_size": 2,
    "engine__sampling": {"max_tokens": 30, "stop": list(range(20, 30))}, "run__checkpoint__every": 0,
    "task__eval__n": 2,
}  # fmt: skip


def rewards(folder) -> list[float]:
    return [row["reward"] for step in store.stored_steps(folder) for row in store.read_step(folder, step)]


def mean(values) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_taking_the_first_flatters_the_training_reward_and_is_said_aloud(tmp_path):
    """Short answers earn more and end first; the weights stand still. The held-out
    score is the same, what is trained is not.
    """
    eval_ = {
        "task__eval": {"sampling": {"temperature": 1.0}},
        "task__data": {"kind": "digits", "holdout": 40},
        "task__eval__every": 0,
    }
    run(tmp_path / "all", **LONG, **eval_, loop__steps=6, loop__groups_per_step=8)
    run(tmp_path / "first", **LONG, **eval_, loop__steps=10, loop__groups_per_step=4, loop__oversample=4)
    check(tmp_path / "first", staleness=0, total=10)
    honest, flattered = mean(rewards(tmp_path / "all")), mean(rewards(tmp_path / "first"))
    scores = [events(tmp_path / name, "Evaluated")[-1]["score"] for name in ("all", "first")]
    assert scores[0] == scores[1]
    assert flattered > honest + 0.1 and abs(honest - scores[0]) < 0.1
    warned = [
        [e["message"] for e in events(tmp_path / name, "Warned") if "finish last earn" in e["message"]]
        for name in ("all", "first")
    ]
    assert not warned[0] and len(warned[1]) == 1 and "less than those that finish first" in warned[1][0]
    assert events(tmp_path / "first", "StepDone")[-1]["ledger"]["filtered/late"] > 10
    late = [e for e in events(tmp_path / "first", "GroupFinished") if e["reason"] == "late"]
    assert late and not any(e["rewards"] or e["lengths"] or e["kept"] for e in late), (
        "they stay out of every other number"
    )


def test_nothing_is_said_where_who_is_late_earns_the_same():
    chance = random.Random(0)
    bias, rows = LateBias(), []
    for step in range(200):
        rows.append({"loop/late_fraction": 0.5, "score/tail_reward_gap": chance.gauss(0, 1)})
        bias.write(step, rows[-1])
        if step == 30:
            assert not bias.told
    assert not bias.told


def test_late_groups_of_repeated_steps_count_once():
    plain, resumed = LateBias(), LateBias()
    gaps = {step: {"loop/late_fraction": 0.5, "score/tail_reward_gap": -1.0 - 0.1 * step} for step in range(7)}
    for step, row in gaps.items():
        plain.write(step, row)
        for bias, back in ((resumed, step - 1), (resumed, step)):
            if back >= 0:
                bias.write(back, gaps[back])
                bias.write(back, {"eval/score": 0.5})
    assert plain.gaps == resumed.gaps and len(plain.gaps) == 7 and not resumed.told


@pytest.mark.slow
@pytest.mark.parametrize("retry", covering(["drop", "retry"], ["retry"]))  # what was dropped is nowhere
def test_an_oversampled_run_resumes(tmp_path, retry):
    changes = {
        **LONG,
        "loop__oversample": {"groups": 3, "late": retry},
        "loop__max_staleness": 1,
        "run__checkpoint__every": 2,
    }
    changes["algo__correction"] = {"kind": "importance"}
    run(tmp_path, **changes, loop__steps=3)
    run(tmp_path, **changes, loop__steps=6)
    check(tmp_path, staleness=1, total=6)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", covering([0, 30], [30]))
def test_a_sample_that_was_given_back_keeps_its_tokens_and_its_group(tmp_path, top_k):
    """What was written before the new weights is in the stored sample, bit for bit;
    a group is trained whole, in one step.
    """
    from rondel.assemble import train

    pieces: dict[int, list] = {}

    def built(parts) -> None:
        plain, plain_step = parts.engine.generate, parts.engine.runner.step

        def slow_step(*plans):
            time.sleep(0.01)  # or a busy machine scores when nobody writes any more, and nothing is given back
            return plain_step(*plans)

        parts.engine.runner.step = slow_step

        async def noted(request):
            done = await plain(request)
            if done.finish_reason == "abort" and done.tokens:
                pieces.setdefault(request.key, []).append(
                    (request.tokens[: len(request.tokens) - request.continuation], done)
                )
            return done

        parts.engine.generate = noted

    changes = {**LONG, "loop__max_staleness": 1, "loop__in_flight": "abort", "engine__max_running": 5, "loop__steps": 5}
    changes["engine__sampling"] = {**LONG["engine__sampling"], "top_k": top_k}
    train(tiny(tmp_path, **changes, algo__correction={"kind": "importance"}), quiet=True, built=built)
    rows = check(tmp_path, staleness=1, total=5)
    where = Counter((row["group"], row["trained_at"]) for row in rows)
    assert len({group for group, _ in where}) == len(where) and set(where.values()) == {2}
    assert not any(row["finish_reason"] == "abort" for row in rows)
    stored = [(row["tokens"], row["behavior_logprobs"], row["versions"]) for row in rows]
    kept = 0
    for prompt, first in (mine[0] for mine in pieces.values()):
        n, m = len(prompt), len(first.tokens)
        begin = (
            [*prompt, *first.tokens],
            [0.0] * n + [pytest.approx(x, rel=1e-6) for x in first.logprobs],
            [-1] * n + first.versions,
        )
        kept += any(
            t[: n + m] == begin[0] and lp[: n + m] == begin[1] and v[: n + m] == begin[2] for t, lp, v in stored
        )
    assert kept, "how many were given back is the machine's affair"


@pytest.mark.slow
def test_the_histogram_of_lag_is_that_of_the_stored_rollouts(tmp_path):
    rows: list[dict[str, float]] = []
    stop = subscribe(StepMetrics(lambda step, row: rows.append(row)).on_event)
    try:
        run(tmp_path, **{**LONG, "loop__max_staleness": 2}, loop__steps=4, algo__correction={"kind": "importance"})
    finally:
        stop()
    told = [row for row in rows if "loop/lag_mean" in row]
    for step, row in zip(store.stored_steps(tmp_path), told, strict=True):
        groups = {r["group"]: r["trained_at"] - r["born"] for r in store.read_step(tmp_path, step)}
        share = {f"loop/lag_is_{lag}": n / len(groups) for lag, n in Counter(groups.values()).items()}
        assert share == {name: value for name, value in row.items() if name.startswith("loop/lag_is_")}
        assert row["loop/lag_limit"] == 2 >= row["loop/lag_max"] == max(groups.values())
    assert len({lag for row in told for lag in row if lag.startswith("loop/lag_is_")}) > 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loop__oversample": {"late": "retry"}}, "late"),
        ({"loop__oversample": 2, "loop__window": 1}, "window"),
        ({"loop__oversample": 2, "loop__in_flight": "drain"}, "drain"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=named):
        tiny(tmp_path, **changes)
