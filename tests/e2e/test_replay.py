"""A recorded run on ranks and engines of its own (law 9), the engine alone, and what cannot be replayed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kits.engine import ask, engine, idle, prompt
from kits.engine import tiny as tiny_model
from kits.recordings import BASE, again
from kits.runs import events, run
from kits.sweeps import covering
from kits.sync import Publisher
from rondel.core.errors import ConfigError, LawError, UserError
from rondel.generate.engine.resumption import generate_until_done
from rondel.models.aligned_numerics import align_numerics
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import WeightUpdate

pytestmark = pytest.mark.slow
FEW = {"engine__sampling": {"max_tokens": 8, "ignore_eos": True}, "algo__group_size": 2}


def test_trainer_ranks_are_replayed_as_so_many(tmp_path):
    run(tmp_path / "run", **{**BASE, **FEW, "loop__oversample": 2}, place__kind="split", place__ranks=2)
    assert any(e["version"] > min(e["born"]) for e in events(tmp_path / "run", "GroupsTaken")), "nothing was behind"
    again(tmp_path / "run", tmp_path / "again")


@pytest.mark.slow
@pytest.mark.sweep  # several ranks are replayed below
def test_two_engines_in_processes_are_replayed_in_one(tmp_path):
    run(tmp_path / "run", **BASE, place__kind="split", place__engines=2)
    again(tmp_path / "run", tmp_path / "again")


# -- the engine alone: whatever happened to a request's cache ------------------------------------------


def aligned_model():
    loaded = tiny_model()
    align_numerics(loaded)
    return loaded


async def life(e, trainer, requests, *, moments: list[int], how: str, arrive: random.Random):
    """All requests, at random moments; new weights each time that so many steps were computed. -> completions"""
    sync, asked = WeightUpdate(FromTensor(), probe=[], score=None, tolerance=1e-4, moved=lambda: True), e.generate
    await sync(trainer, e)
    steps = 0
    plain = e.serving.run

    async def counted(*args):
        nonlocal steps
        steps += args[0] == e.runner.step  # weights that come take as many calls as the clock says
        return await plain(*args)

    e.serving.run = counted

    async def one(request):
        for _ in range(arrive.randrange(40)):
            await asyncio.sleep(0)
        return await generate_until_done(asked, request)

    tasks = [asyncio.create_task(one(r)) for r in requests]
    for moment in moments:
        while steps < moment and not all(t.done() for t in tasks):
            await asyncio.sleep(0)
        await e.pause(how)
        trainer.train()
        await sync(trainer, e)
        await e.resume()
    return await asyncio.gather(*tasks)


STINTS = [(seed, how) for seed in (1, 3) for how in ("hold", "abort")]


@pytest.mark.parametrize(("seed", "how"), covering(STINTS, [STINTS[0], STINTS[3]]))
def test_an_engine_goes_through_its_stints_again(seed, how):
    """Prompts cut in the middle by new weights, requests whose cache was taken from them,
    samples begun twice: all drawn again, bit for bit.
    """
    chance = random.Random(seed)
    requests = [ask(prompt(i % 5, chance.choice([3, 20, 90])), key=i, n=chance.randrange(1, 40)) for i in range(12)]
    first = engine(aligned_model(), kv_pages=150, max_running=6, prefill_tokens=16)
    pieces: dict = {}
    generate = first.generate

    async def noted(request):
        done = await generate(request)
        if done.tokens:
            pieces[request.key, request.continuation] = tuple(done.stints)
        return done

    first.generate = noted
    moments = sorted(chance.sample(range(2, 60), 12))
    told = asyncio.run(life(first, Publisher(first.loaded), requests, moments=moments, how=how, arrive=chance))
    assert first.scheduler.retracted and any(len(set(c.versions)) > 2 for c in told)
    if how == "hold":
        assert any(not written and computed for stints in pieces.values() for _, computed, written in stints), (
            "no prompt was cut"
        )
    second = engine(aligned_model(), max_running=24, prefill_tokens=50)
    again, awaited = second.generate, dict(pieces)

    async def following(request):
        lines = pieces.get((request.key, request.continuation), ())
        awaited.pop((request.key, request.continuation), None)
        return await again(replace(request, lines=lines))

    second.generate = following
    pause = second.pause

    async def when_all_have_come(how):
        while any(second.version in [v for v, *_ in stints] for stints in awaited.values()):
            await asyncio.sleep(0)
        await pause(how)

    second.pause = when_all_have_come
    moments = [0] * len(moments)
    repeated = asyncio.run(
        life(second, Publisher(second.loaded), requests, moments=moments, how=how, arrive=random.Random(99))
    )
    for a, b in zip(told, repeated, strict=True):
        assert (a.tokens, a.logprobs, a.versions, a.finish_reason) == (
            b.tokens,
            b.logprobs,
            b.versions,
            b.finish_reason,
        )
    idle(second)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine__numerics": "fast"}, "engine.numerics"),
        ({"place__threads": "auto"}, "place.threads"),
        ({"engine__speculative": {"kind": "ngram"}}, "engine.speculative.kind"),
        ({"engine__compile": True}, "engine.compile"),
    ],
)
def test_what_could_not_be_replayed_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=rf"run\.record: .*{named}"):
        run(tmp_path, **{**BASE, **changes})


def test_only_a_whole_recorded_run_is_replayed(tmp_path):
    run(tmp_path / "plain", **{**BASE, "run__record": False, "loop__steps": 1})
    with pytest.raises(UserError, match="--record"):
        again(tmp_path / "plain", tmp_path / "again")
    run(tmp_path / "run", **{**BASE, "loop__steps": 1})
    with pytest.raises(UserError, match="not empty"):
        again(tmp_path / "run", tmp_path / "plain")
    with pytest.raises(ConfigError, match="--run"):
        run(tmp_path / "run", **{**BASE, "loop__steps": 2})
    with (tmp_path / "run" / "schedule.jsonl").open("a") as file:
        file.write('["spoiled","an engine ended"]\n')
    with pytest.raises(UserError, match="an engine ended"):
        again(tmp_path / "run", tmp_path / "again")


def test_a_reward_that_reads_the_world_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setenv("RONDEL_TEST_WORLD", "2")
    run(
        tmp_path / "run",
        **{
            **BASE,
            "task__reward": "kits.rewards:world",
            "task__filters": ["signal"],
            "algo__group_size": 2,
            "loop__steps": 2,
        },
    )
    monkeypatch.setenv("RONDEL_TEST_WORLD", "3")
    with pytest.raises(ExceptionGroup) as caught:
        again(tmp_path / "run", tmp_path / "again")
    assert caught.group_contains(LawError, match="left the recorded run")
