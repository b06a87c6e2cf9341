"""An engine of two processes that have requests of their own and share experts (data parallel attention): it writes what
one process writes, holds twice as many tokens, and one without requests stops nobody.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from kits.engine import all_of, ask, engine, idle, plain_logprobs, prompt, twin, watched
from kits.engine_ranks import RankedEngines, same_answers, whole
from kits.runs import RECIPE, check, events, final, run
from kits.sweeps import covering
from kits.sync import Publisher, wrote
from rondel.assemble.refusals import _check_engine_ranks
from rondel.assemble.served_engine import ServerSettings, open_engine
from rondel.core.config.job import Job
from rondel.core.config.place import PlaceConfig
from rondel.core.errors import ConfigError, EngineError, ModelError, UserError
from rondel.generate.engine.builtin.requests_apart import ApartLayout
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models import collectives
from rondel.planner.traffic import expert_traffic
from rondel.sync.from_ipc import FromIpc
from rondel.sync.update import WeightUpdate

pytestmark = pytest.mark.slow
MIXTURES = ["mixtral", "gpt_oss", "deepseek_v32", "qwen3_next"]  # with sinks, chosen keys, recurrent states
PROBE = prompt(0, 16, 50)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    made = RankedEngines(tmp_path_factory.mktemp("apart"), experts_apart=True, requests_apart=True)
    yield made
    made.close()
    assert made.ended == []


def asked(n=6, wants=(), new=10):
    """Greedy and sampled, siblings and strangers."""
    requests = [ask(prompt(i // 2, 9 + 7 * (i // 2), 50), key=i, n=new, temperature=float(i % 2)) for i in range(n)]
    return [replace(request, wants=frozenset(wants)) for request in requests]


def owners(e):
    """Which rank each request was admitted to, by key, filled while it runs."""
    found, admit = {}, e.scheduler._admit_sequence

    def noted(live, owner, *rest, **more):
        if n := admit(live, owner, *rest, **more):
            found.setdefault(live.request.key, []).append(owner)
        return n

    e.scheduler._admit_sequence = noted
    return found


@pytest.mark.parametrize("kind", covering(MIXTURES, ["qwen3_next"]))  # pages and states; pages alone: below
def test_tokens_routes_and_updates_are_those_of_one_process(engines, kind):
    """Before and after updates in the middle of answers: tokens, experts of each request, logprobs to 1e-5."""
    settings = {"kv_pages": 256, "routes": True}
    ours = watched(engines.of(kind, transports={"ipc": FromIpc()}, **settings))
    theirs, where = engine(whole(kind), **settings), owners(ours)

    async def scenario(e):
        told = await all_of(e, asked(wants={"experts"}))
        told += await all_of(e, asked(1, wants={"experts"}))  # one rank has nothing to do
        told += await all_of(e, asked(wants={"experts", "raw_logprobs", "prompt_logprobs"}))  # from the prefix caches
        idle(e)
        return told

    told = same_answers(asyncio.run(scenario(ours)), asyncio.run(scenario(theirs)), cached=False)
    assert sum(answer.cached_tokens for answer in told[7:]) > 0
    assert {rank for ranks in where.values() for rank in ranks} == {0, 1}, "both ranks had requests"
    assert all(where[i][0] == where[i + 1][0] for i in (0, 2, 4)), "siblings stay with their prompt"
    part = ours.loaded.lead.part
    held = dict(part.loaded.model.named_parameters())
    for name, (shape, _) in part.module.items():
        if name in held:
            first = shape[0] // 2 if ".experts." in name else shape[0]
            assert tuple(held[name].shape) == (first, *shape[1:]), "experts apart, everything else whole"

    trainer = Publisher(whole(kind), transport=FromIpc())

    async def score(tokens):
        return [0.0, *plain_logprobs(trainer.loaded, tokens)]

    update = WeightUpdate(trainer.transport, probe=PROBE, score=score, tolerance=1e-4, moved=lambda: True)

    async def updates():
        running = [asyncio.ensure_future(ours.generate(request)) for request in asked(4, new=40)]
        await wrote(ours, 5)
        for version in (1, 2):
            trainer.train()
            assert await update(trainer, ours) == version == ours.version
            told, true = await all_of(ours, asked(2)), await all_of(engine(twin(trainer.loaded)), asked(2))
            assert [a.tokens for a in told] == [b.tokens for b in true]
            assert {v for answer in told for v in answer.versions} == {version}
        assert all(len(answer.tokens) == 40 for answer in await asyncio.gather(*running))
        idle(ours)

    asyncio.run(updates())
    trainer.transport.close()


def test_the_caches_hold_the_sum(engines):
    """80 pages a rank: what one process of 80 pages cannot run together, two do; and one request needs one of them."""
    e = watched(engines.of("qwen3_moe", kv_pages=80))
    one = engine(whole("qwen3_moe"), kv_pages=80)
    requests = [ask(prompt(i, 30, 50), key=i, n=12) for i in range(4)]
    most = {}

    async def scenario(e):
        mark = e.scheduler.mark_computed

        def counted(plan):
            mark(plan)
            used = [cache.in_use for cache in e.scheduler.caches]
            most[e] = max(most.get(e, [0]), used, key=sum)

        e.scheduler.mark_computed = counted
        told = await all_of(e, requests)
        idle(e)
        assert (await e.status()).pages_total == e.scheduler.caches.page_counts["total"] == 80 * len(e.scheduler.caches)
        return told

    same_answers(asyncio.run(scenario(e)), asyncio.run(scenario(one)), cached=False)
    assert sum(most[one]) <= 80 < sum(most[e]) and max(most[e]) <= 80 and min(most[e]) >= 60
    with pytest.raises(UserError, match="do not fit into 80 cache pages"):
        asyncio.run(e.generate(ask(prompt(1, 70, 50), n=20)))


def test_guesses(engines):
    """Rows of guesses beside rows of others, on either rank."""
    spec = SpeculativeDecoder(4)
    e = watched(engines.of("qwen3_moe", speculation=spec))
    repeated = [ask(prompt(i, 8, 50) * 4, key=i, n=24, temperature=0) for i in range(4)]
    where = owners(e)
    ours, theirs = (asyncio.run(all_of(each, repeated)) for each in (e, engine(whole("qwen3_moe"))))
    same_answers(ours, theirs)
    assert spec.proposed > spec.accepted > 0 and {i for (i, *_) in where.values()} == {0, 1}
    idle(e)


@pytest.mark.parametrize("kind", covering(["qwen3_moe", "qwen3_next"], ["qwen3_moe"]))
def test_retraction_abort_and_sleep(engines, kind):
    """Each rank makes room for its own requests; what leaves is free on the rank where it was."""
    settings = {"kv_pages": 60, "prefill_tokens": 16}
    e = watched(engines.of(kind, **settings))

    async def crowded(e):
        told = await all_of(e, [ask(prompt(i, 20, 50), key=i, n=25) for i in range(7)])
        assert e.scheduler.retracted > 0
        idle(e)
        return told

    one = engine(whole(kind), **settings)
    same_answers(asyncio.run(crowded(e)), asyncio.run(crowded(one)), cached=False)

    async def paused(e):
        running = [asyncio.ensure_future(e.generate(request)) for request in asked(4, new=30)]
        await wrote(e, 3)
        await e.pause("hold")
        await e.sleep(("weights", "kv_cache"))
        await e.wake(("weights", "kv_cache"))
        await e.resume()
        await wrote(e, 5)
        assert await e.abort(lambda request: request.key in (0, 3)) == 2
        return await asyncio.gather(*running)

    ours, theirs = asyncio.run(paused(e)), asyncio.run(paused(one))
    idle(e)
    for key, (a, b) in enumerate(zip(ours, theirs)):
        n = min(len(a.tokens), len(b.tokens))
        assert a.tokens[:n] == b.tokens[:n] and (a.finish_reason == "abort") == (key in (0, 3))
        assert key in (0, 3) or n == 30
    freed = asyncio.run(e.flush_cache())
    assert freed > 0 and e.scheduler.caches.page_counts["free"] == 120


def test_a_text_is_scored_by_every_rank_and_they_must_agree(engines):
    e, one = engines.of("mixtral"), engine(whole("mixtral"))
    ours, theirs = (asyncio.run(each.score(ask(PROBE))).logprobs for each in (e, one))
    assert ours == pytest.approx(theirs, abs=1e-5)
    with torch.no_grad():
        e.loaded.model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(EngineError, match="rank 1 of the engine scores a text differently than the first"):
        asyncio.run(e.score(ask(PROBE)))


def test_bytes_that_travel_are_those_of_the_formula(engines, monkeypatch):
    """Rows that the first rank's tokens send to experts elsewhere and get back, by the recorded experts; on average over
    routes the formula's; and pages of keys and values as many on each rank as on one process.
    """
    e = engines.of("qwen3_moe", kv_pages=256, routes=True)
    moved, own, passes = [], collectives._all_to_all, []
    hidden = type(e.loaded).hidden_states

    def counting(x, sent, got, ranks):
        moved.append(sent[1] * x[:1].nbytes if len(x) else 0)
        return own(x, sent, got, ranks)

    def watching(loaded, tokens, positions, layout, tape=None, seen=None):
        out = hidden(loaded, tokens, positions, layout, tape, seen)
        assert isinstance(layout, ApartLayout)
        passes.append((layout.counts[:], tape.recorded_routes))
        return out

    monkeypatch.setattr(collectives, "_all_to_all", counting)
    monkeypatch.setattr(type(e.loaded), "hidden_states", watching)
    requests = [replace(ask(prompt(i, 20, 50), key=i, n=1), wants=frozenset({"experts"})) for i in range(4)]
    asyncio.run(all_of(e, requests))
    config = e.loaded.model.config
    half, width = config.num_experts // 2, 4 * config.hidden_size
    sent = passed = 0
    for counts, routes in passes:  # with tokens on both ranks in all of them
        assert all(counts) and len(routes) == sum(counts)
        mine, theirs = routes.split(counts)
        sent += int((mine >= half).sum()) * width  # away, to the other's experts
        passed += int((theirs < half).sum()) * width  # what came from there, on its way back
    assert sum(moved) == sent + passed
    tokens, layers, k = 4096, passes[0][1].shape[1], config.num_experts_per_tok
    every = torch.rand(tokens, layers, config.num_experts, generator=torch.Generator().manual_seed(0)).topk(k).indices
    away = 2 * width * int((every[: tokens // 2] >= half).sum())  # even routes, there and back
    formula = layers * expert_traffic(2, tokens * width, k)
    assert formula == pytest.approx(away, rel=0.05)
    pools = e.pages.keys.pool_bytes + e.pages.values.pool_bytes
    assert pools == 257 * e.loaded.cached == 257 * 2 * layers * 4 * config.num_key_value_heads * config.head_dim


def test_what_does_not_combine_is_refused(engines):
    with pytest.raises(
        ModelError, match=r"'llama' has no experts.*dp of attention shares experts; use several engines"
    ):
        engines.of("llama")
    for sizes, said in (
        ({"dp": 2}, r"dp = 2 with ep = 1: .* set ep = 2, or use engines = { count = 2 }"),
        ({"dp": 2, "ep": 4}, r"dp = 2 with ep = 4"),
        ({"dp": 2, "ep": 2, "tp": 2}, r"tp = 2 with dp = 2 is not supported"),
        ({"dp": 2, "ep": 2, "prefill": True}, r"dp = 2 with prefill = true is not supported"),
    ):
        with pytest.raises(ValueError, match=said):
            PlaceConfig(kind="split", engines=sizes)
    for served, said in (
        ({"dp": 2}, "--dp 2 with --ep 1: .* give both the same"),
        ({"dp": 2, "ep": 2, "tp": 2}, "--dp 2 with --tp 2 is not supported"),
        ({"dp": 2, "ep": 2, "speculative": "draft:x"}, "--dp 2 has no cache for a draft model"),
        ({"dp": 2, "ep": 2, "compile": True, "device": "cpu"}, "--compile with --dp 2"),
        ({"dp": 2, "ep": 2, "numerics": "aligned"}, "leave out --tp, --dp, --encoders and --compile"),
    ):
        with pytest.raises(UserError, match=said), ExitStack() as ends:
            open_engine("nowhere", ServerSettings(**served), ends)
    apart = {"place.kind": "split", "place.engines": {"dp": 2, "ep": 2}}
    _check_engine_ranks(Job.read(RECIPE, {**apart, "engine.speculative": {"kind": "ngram"}}))
    with pytest.raises(ConfigError, match=r"place\.engines\.dp = 2 has no cache for a draft model on each process"):
        _check_engine_ranks(Job.read(RECIPE, {**apart, "engine.speculative": {"kind": "draft", "model": "nowhere"}}))
    place = PlaceConfig(kind="split", engines={"dp": 2, "ep": 2})
    assert (place.engine_processes, place.engine_dp, place.engine_experts_apart) == (2, 2, True)
    assert len(asyncio.run(engines.of("mixtral").generate(ask(PROBE))).tokens) == 16, "the ranks go on"


def test_a_rank_that_is_killed_is_named(tmp_path):
    made = RankedEngines(tmp_path, patience=5.0, experts_apart=True, requests_apart=True)
    e = made.of("qwen3_moe")
    [follower] = made.ranks.followers

    async def main():
        running = [asyncio.ensure_future(e.generate(request)) for request in asked(2, new=200)]
        async with asyncio.timeout(30):
            await wrote(e, 5)
        os.kill(follower.pid, signal.SIGKILL)
        for error in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(error, EngineError) and "worker engine-rank-1" in str(error) and "SIGKILL" in str(error)

    try:
        asyncio.run(main())
    finally:
        made.close()
    assert len(made.ended) == 1 and "worker engine-rank-1" in made.ended[0]


def test_a_run_learns_what_it_does_with_one_process(tmp_path):
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    model = {"random": "qwen3_moe", **sizes, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    how = {
        "model__path": model,
        "place__kind": "split",
        "loop__warmup__steps": 0,
        "loop__steps": 2,
        "place__patience": 10.0,
    }
    run(tmp_path / "one", **how)
    run(tmp_path / "two", **how, place__engines={"dp": 2, "ep": 2})
    one, two = (check(tmp_path / name, staleness=0, total=2) for name in ("one", "two"))
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    assert all(e["probe_gap"] < 1e-5 for e in events(tmp_path / "two", "Synced"))
    a, b = (final(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a if name.startswith("model"))
