"""An engine of two processes, each with a part of every matrix: what one process writes, it writes, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from kits.engine import all_of, ask, engine, idle, inline, prompt, watched
from kits.engine_ranks import ranked_engines, whole
from kits.sync import wrote
from rondel.core.errors import ConfigError, ModelError
from rondel.core.types import Request, Sampling
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder

pytestmark = pytest.mark.slow
CLOSE = 1e-5


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    with ranked_engines(tmp_path_factory.mktemp("ranks")) as made:
        yield made
    assert made.ended == []


def alike(engines, kind, scenario, **settings):
    """What a scenario tells of an engine of two processes, and of one: equal, logprobs to 1e-5. -> what it told."""
    ours = asyncio.run(scenario(watched(engines.of(kind, **settings))))
    theirs = asyncio.run(scenario(watched(engine(whole(kind), **{"run": inline, **settings}))))
    same(ours, theirs)
    return ours


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert (a.tokens, a.finish_reason, a.cached_tokens, a.versions) == (
            b.tokens, b.finish_reason, b.cached_tokens, b.versions,
        )  # fmt: skip
        assert a.logprobs == pytest.approx(b.logprobs, abs=CLOSE)
        assert (a.experts is None) == (b.experts is None) and (a.experts is None or (a.experts == b.experts).all())
        assert a.support == b.support
        for streams in ("raw_logprobs", "prompt_logprobs"):
            assert (getattr(a, streams) or []) == pytest.approx(getattr(b, streams) or [], abs=CLOSE)
    return ours


def mixed(n=6, **more):
    """Greedy and sampled, siblings and strangers."""
    return [ask(prompt(i // 2, 9 + 7 * (i // 2), 50), key=i, n=10, temperature=float(i % 2), **more) for i in range(n)]


@pytest.mark.parametrize(
    "kind",
    ["llama", "one_key", "untied", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "lfm2", "qwen3_next", "falcon_h1"],
)
def test_every_family_writes_what_one_process_writes(engines, kind):
    async def scenario(e):
        told = await all_of(e, mixed())
        again = await all_of(e, mixed())  # from the prefix cache
        scored = [await e.score(request) for request in mixed()]
        assert [row.version for row in scored] == [0] * 6
        idle(e)
        return [*told, *again, *(_scored(row.logprobs) for row in scored)]

    told = alike(engines, kind, scenario, kv_pages=512)
    assert sum(answer.cached_tokens for answer in told[6:12]) > 0


def _scored(logprobs):
    from rondel.core.types import Completion

    return Completion([], logprobs, [], "length")


def test_experts_are_recorded_as_one_process_records_them(engines):
    async def scenario(e):
        requests = [Request(r.tokens, r.sampling, key=r.key, wants=frozenset({"experts"})) for r in mixed()]
        return await all_of(e, requests)

    told = alike(engines, "qwen3_moe", scenario, routes=True)
    assert all(answer.experts is not None for answer in told)


def test_retraction_truncation_and_streams_beside_the_tokens(engines):
    wants = frozenset({"raw_logprobs", "prompt_logprobs", "support"})

    async def scenario(e):
        requests = [
            Request(prompt(i, 20, 50), Sampling(max_tokens=20, ignore_eos=True, top_k=5, top_p=0.8), key=i, wants=wants)
            for i in range(5)
        ]
        told = await all_of(e, requests)
        assert e.scheduler.retracted > 0
        idle(e)
        return told

    told = alike(engines, "llama", scenario, kv_pages=100, prefill_tokens=16)
    assert all(len(answer.prompt_logprobs) == 20 and max(map(len, answer.support)) <= 5 for answer in told)


@pytest.mark.parametrize("how", ["hold", "drain", "abort"])
def test_pauses_and_sleep(engines, how):
    async def scenario(e):
        asked = [asyncio.ensure_future(e.generate(request)) for request in mixed(4)]
        await wrote(e, 3)
        await e.pause(how)
        if how == "hold":
            await e.sleep(("weights", "kv_cache"))
            await e.wake(("weights", "kv_cache"))
        await e.resume()
        return await asyncio.gather(*asked)

    ours = asyncio.run(scenario(engines.of("llama")))
    theirs = asyncio.run(scenario(engine(whole("llama"))))
    if how == "abort":  # where they were is a matter of timing
        for a, b in zip(ours, theirs):
            n = min(len(a.tokens), len(b.tokens))
            assert a.finish_reason == "abort" and a.tokens[:n] == b.tokens[:n] and n >= 3
    else:
        assert [a.tokens for a in ours] == [b.tokens for b in theirs]


def test_guesses_of_ngrams(engines):
    async def scenario(e):
        tokens = prompt(3, 8, 50) * 4
        return await all_of(e, [ask(tokens, key=i, n=24, temperature=0) for i in range(3)])

    kind = "llama"
    ours = asyncio.run(scenario(engines.of(kind, speculation=SpeculativeDecoder(4))))
    theirs = asyncio.run(scenario(engine(whole(kind))))
    assert [a.tokens for a in ours] == [b.tokens for b in theirs]


def test_what_cannot_be_cut_is_refused(engines):
    for kind, error, said in (
        ("mamba", ModelError, "no plan for tensor parallelism.*tp = 1"),
        ("three_heads", ModelError, "tp = 2 does not divide the 3 attention heads"),
        ("deepseek_v32", ConfigError, "an indexer cannot be cut"),
    ):
        with pytest.raises(error, match=said):
            engines.of(kind)
    assert len(asyncio.run(engines.of("llama").generate(ask(prompt(1, 9, 50)))).tokens) == 16, "the ranks go on"
