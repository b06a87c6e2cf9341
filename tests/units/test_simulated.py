"""The simulator runs the house's own loop; here it is held against closed forms, against
counts of real runs, and against the laws.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from rondel.core.errors import UserError
from rondel.planner import cost
from rondel.planner.overlap import StepTimes
from rondel.planner.workload import what_if
from rondel.simulate import SimulatedWorld, simulate, world_of
from rondel.simulate.clock import VirtualLoop
from rondel.simulate.lengths import log_normal, long_tailed, recorded_lengths

pytestmark = pytest.mark.slow

PLACES, LENGTH = 16, 100.0


def flat(engines=8, trainers=8, *, seconds_a_sample=1.0, **more):
    """Equal answers and full engines: R = engines·PLACES/LENGTH samples a second, T = trainers/seconds_a_sample."""
    batch = {"prompts": engines * PLACES // 4, "group": 4}
    return SimulatedWorld(
        engines=engines, places=PLACES, beat=[1.0] * (PLACES + 1), prefill=0.0, train=seconds_a_sample / trainers / LENGTH,
        lengths=log_normal(LENGTH, 0, LENGTH), **batch, **more,
    )  # fmt: skip


@pytest.mark.parametrize("cost_of_training", [0.2, 0.78125, 6.25, 20.0])
def test_rates_are_the_closed_forms(cost_of_training):
    """min(R, T) with overlap, RT/(R + T) without, G·rt/(r + t) in turn: within 5 %."""
    world = flat(seconds_a_sample=cost_of_training)
    R, T = 8 * PLACES / LENGTH, 8 / cost_of_training
    rate = {s: simulate(replace(world, staleness=s), steps=30)["samples_per_second"] for s in (0, 2)}
    assert rate[2] == pytest.approx(StepTimes.from_rates(R, T, overlap=True).rate, rel=0.05)
    assert rate[0] == pytest.approx(StepTimes.from_rates(R, T, overlap=False).rate, rel=0.05)
    turns = simulate(replace(world, shared=True), steps=30)["samples_per_second"]
    assert turns == pytest.approx(StepTimes.from_rates(R, T, overlap=False).rate, rel=0.05)
    if pytest.approx(T, rel=0.01) == R:
        assert rate[2] / rate[0] >= 1.6, "overlap of equal pools"


def test_an_engine_with_one_group_more_writes_it_at_once():
    """16 groups of 8 on 6 engines: three of them are 24 requests, and an engine may decode 256."""
    world = world_of(what_if(["model=7b", "gpus=8", "place=split", "trainers=2", "staleness=0"]), sigma=0)
    longest = world.beat[24] * 1024 + 3 * world.prompt * world.prefill
    training = world.train * (16 * world.prompt + 128 * 1024) + world.fixed + world.sync
    assert simulate(world, steps=5)["step_seconds"] == pytest.approx(longest + training, rel=0.03)


def test_the_faster_pool_idles():
    for cost_of_training in (1.0, 40.0):
        R, T = 8 * PLACES / LENGTH, 8 / cost_of_training
        told = simulate(flat(seconds_a_sample=cost_of_training, staleness=2), steps=30)
        faster, slower = ("trainer_idle", "rollout_idle") if T > R else ("rollout_idle", "trainer_idle")
        expected = StepTimes.from_rates(R, T, overlap=True)
        assert told[faster] == pytest.approx(max(expected.trainer_idle, expected.engine_idle), abs=0.05)
        assert told[slower] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("in_flight", ["hold", "drain", "abort"])
def test_no_lag_is_more_than_allowed(staleness, shared, in_flight):
    world = flat(2, 2, staleness=staleness, shared=shared, in_flight=in_flight, prompt=10.0, sync=5.0, pause=1.0)
    told = simulate(replace(world, lengths=log_normal(LENGTH, 1.2, 2000), prefill=0.01), steps=25)
    assert max(map(int, told["lags"])) <= staleness
    assert told["steps"] == 25 and sum(told["lags"].values()) == pytest.approx(1)


@pytest.mark.parametrize("staleness, measured", [(0, 0.79), (1, 0.58), (2, 0.38), (4, 0.07)])
def test_tails_idle_as_they_do_in_real_runs(staleness, measured):
    """`rondel bench tails`: 64 places on a shared device, one of ten answers of 16 tokens has 128; twelve steps."""
    world = SimulatedWorld(
        engines=1, places=64, beat=[1.0] * 65, prefill=0.0, train=0.001, lengths=long_tailed(16, 0.1, 8), prompts=16, group=4, shared=True,
        staleness=staleness,
    )  # fmt: skip
    idle = [simulate(replace(world, seed=seed), steps=12, first=0)["places_idle"] for seed in range(8)]
    assert sum(idle) / len(idle) == pytest.approx(measured, abs=0.04)


@pytest.mark.parametrize("staleness, least", [(0, 0.7875), (1, 0.575), (2, 0.3625)])
def test_no_step_is_shorter_than_the_longest_answer_allows(staleness, least):
    """An answer of 128 is in time only if S + 1 steps take 128 decode steps: of 64 places
    1 - 27.2·(S + 1)/128 are empty at least.
    """
    world = SimulatedWorld(
        engines=1, places=64, beat=[1.0] * 65, prefill=0.0, train=0.001, lengths=long_tailed(16, 0.1, 8), prompts=16, group=4, shared=True,
        staleness=staleness,
    )  # fmt: skip
    told = simulate(world, steps=60)
    assert least - 0.03 <= told["places_idle"] <= least + 0.08


def test_drain_and_abort_cost_more_than_hold():
    world = flat(4, 4, seconds_a_sample=0.5, staleness=2, prompt=50.0, sync=1.0, pause=0.01)
    world = replace(world, lengths=log_normal(LENGTH, 1.0, 1000), prefill=0.05)
    rate = {
        how: simulate(replace(world, in_flight=how), steps=30)["samples_per_second"]
        for how in ("hold", "abort", "drain")
    }
    assert rate["hold"] > rate["abort"] and rate["hold"] > rate["drain"]


def test_stragglers_and_failures_cost_and_lose_nothing():
    world = flat(8, 8, seconds_a_sample=0.5, staleness=1)
    well = simulate(world, steps=20)
    slow = simulate(replace(world, slow=(0.25, 3.0)), steps=20)
    assert slow["samples_per_second"] < well["samples_per_second"]
    broken = simulate(replace(world, mtbf=2000.0, restart=300.0, prefill=0.01), steps=20)
    assert broken["failures"] > 3 and broken["samples_per_second"] < well["samples_per_second"]
    assert broken["steps"] == 20, "every group came home"


def test_the_same_seed_is_the_same_run():
    world = replace(flat(staleness=1), lengths=log_normal(LENGTH, 1.0, 1000))
    assert simulate(world, steps=8) == simulate(world, steps=8) != simulate(replace(world, seed=1), steps=8)


def test_ten_thousand_devices():
    """Bounded by work, not by time: events are counted in answers, so so many devices
    are tens of thousands of them a step.
    """
    setting = what_if(["model=7b", "gpus=10240", "prompts=512", "output=8k", "staleness=2", "trainers=2560"])
    told = simulate(world_of(setting), steps=2, first=1)
    assert told["steps"] == 2 and told["samples_per_second"] > 0 and max(map(int, told["lags"])) <= 2


def test_the_chain_names_what_helps_and_it_does():
    from rondel.simulate.chain import PUBLISHED, TIERS, build_chain

    rows = build_chain((8, 64, 256, 4096), gain_devices=8, steps=1)
    assert [row["devices"] for row in rows["tiers"]] == [n for n in TIERS if n not in (1024, 10240)]
    assert all(row["gain"] > 1 for row in rows["tiers"])
    gain = [row["gain"] for row in rows["gains"]]
    assert gain[0] == pytest.approx(1, abs=0.15), "equal lengths: asynchrony is as fast as perfect colocation"
    assert gain[-1] > gain[1] > gain[0]
    assert rows["published"].keys() == PUBLISHED.keys()


@pytest.mark.parametrize(
    "words, says",
    [
        (["--staleness", "0,x"], "numbers with commas between"),
        (["--split", "1:9"], "leaves one side empty"),
        (["--split", "one"], "it is TRAIN:GENERATE"),
        (["--tail", "8"], "is not SHARE:TIMES"),
        (["--lengths", "nowhere"], "no journal at nowhere"),
        (["--in-flight", "hol"], "Did you mean 'hold'?"),
        (["--sigma", "-1"], "it is 0 or more"),
    ],
)
def test_what_cannot_be_simulated(capsys, words, says):
    from rondel.cli import main

    with pytest.raises(SystemExit) as end:
        main(["simulate", "--what-if", "model=7b", "gpus=2", "place=split", *words])
    err = capsys.readouterr().err
    assert (
        end.value.code == 1 and says in err.split("\nMore: ")[0] and err.split("\nMore: ")[0].rstrip().count("\n") == 0
    )


def test_a_sweep(capsys):
    import json

    from rondel.cli import main

    asked = [
        "simulate",
        "--what-if",
        "model=7b",
        "gpus=8",
        "--staleness",
        "0,2",
        "--split",
        "1:1,1:3",
        "--steps",
        "3",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        main(asked)
    told = json.loads(capsys.readouterr().out)
    assert not end.value.code
    assert [(row["split"], row["staleness"]) for row in told["rows"]] == [
        ("4:4", 0),
        ("4:4", 2),
        ("2:6", 0),
        ("2:6", 2),
    ]


def test_lengths_of_a_recorded_run(tmp_path):
    import random

    (tmp_path / "journal.jsonl").write_text('{"kind": "GroupFinished", "lengths": [3, 9]}\n{"kind": "StepDone"}\n')
    drawn = {recorded_lengths(tmp_path)(random.Random(seed)) for seed in range(20)}
    assert drawn == {3, 9}
    with pytest.raises(ValueError, match="no journal at"):
        recorded_lengths(tmp_path / "nowhere")


def test_a_clock_that_would_spin_is_refused():
    with pytest.raises(UserError, match="no engine is that fast"):
        simulate(replace(flat(), beat=[1e-9] * (PLACES + 1)), steps=2)


def test_virtual_time_stands_still_while_something_real_is_waited_for():
    async def go() -> tuple[float, bool]:
        loop = asyncio.get_running_loop()
        timer = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        with loop.freeze_clock():
            await asyncio.to_thread(time.sleep, 0.05)
        before, due = loop.time(), timer.done()
        await timer
        return before, due

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(go()) == (0.0, False) and runner.get_loop().time() == 3600


@pytest.mark.parametrize("parts", [2, 8])
def test_a_step_trained_in_parts_hides_all_but_the_last_one(parts):
    """With answers that end one after the other and training as long as generation a step of m parts takes
    (1 + 1/m) of generation, where one part takes 2 of it.
    """
    rolling = SimulatedWorld(
        engines=1, places=1, beat=[1.0, 1.0], prefill=0.0, train=1.0, lengths=log_normal(LENGTH, 0, LENGTH), prompts=16, group=1
    )  # fmt: skip
    generation = 16 * LENGTH
    whole, piped = (simulate(replace(rolling, parts=n), steps=4) for n in (1, parts))
    assert whole["step_seconds"] == pytest.approx(2 * generation, rel=0.02)
    assert piped["step_seconds"] == pytest.approx((1 + 1 / parts) * generation, rel=0.02)
    assert piped["trainer_idle"] == pytest.approx(1 - 1 / (1 + 1 / parts), abs=0.02) and piped["lags"] == {"0": 1.0}


def test_several_controllers_take_their_share_of_the_answers():
    """Where a controller is what everything waits for, n of them make n times as many answers."""
    busy = flat(engines=8, seconds_a_sample=0.01, answer=2.0, staleness=2)
    rates = [simulate(replace(busy, controllers=n), steps=10)["samples_per_second"] for n in (1, 2)]
    assert rates[0] == pytest.approx(1 / 2.0, rel=0.05) and rates[1] == pytest.approx(2 / 2.0, rel=0.05)


def test_rates_that_were_measured_are_used():
    """Tokens a second of one device, of those that generate and of those that train."""
    setting = what_if(["model=7b", "gpus=8", "place=split", "trainers=4", "prompts=64", "mean=1000", "output=1000"])
    known = replace(setting, generate_rate=900.0, train_rate=5000.0)
    step = simulate(world_of(replace(known, staleness=2), sigma=0.0), steps=4)
    assert cost.train_seconds(known) >= known.packed_tokens / 20_000
    assert cost.tokens_seconds(known) == known.packed_tokens / 20_000
    decoding = cost.decode_concurrency(known) / (900.0 * known.tensor)
    assert world_of(known).beat[cost.decode_concurrency(known)] == pytest.approx(decoding)
    assert 0.7 * 3600 < step["tokens_per_second"] <= 3600
    assert cost.measured_decode_scale(setting) == 1.0
