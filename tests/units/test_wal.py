"""The token log (law 15): whole blocks only, the past that this life has, and the routes of mixtures."""

from __future__ import annotations

import asyncio
import copy
import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kits.engine import SIZE, all_of, ask, engine, prompt, publish_in_place, tiny
from kits.runs import run, run_and_die
from kits.sweeps import covering
from kits.token_log import BIG, asked, counted, dies, rows, said, serving, two_versions
from rondel.core.types import Request, sample_key
from rondel.generate.engine.resumption import generate_until_done
from rondel.runtime.journal import store
from rondel.runtime.journal.wal import TokenLog


@pytest.fixture
def folder(tmp_path):
    return two_versions(tmp_path)


def test_a_sample_goes_on_at_another_engine_from_one_log_alone(folder, tmp_path_factory):
    """Where two engines have drawn it, the longer one counts: a mixture of both was drawn by nobody."""
    mine = tmp_path_factory.mktemp("other")
    log = TokenLog(mine)
    log.record_version(4, "root-4")
    log.write([(1, i, 7, -1.0, 900 + i, 4) for i in range(3)])
    log.close()
    log = TokenLog(mine, beside=[folder, mine])
    log.record_version(4, "root-4")
    assert said(log, 1) == list(range(100, 107)) and said(log, 1) == []
    assert said(log, 3) == [100, 101]
    shorter = TokenLog(mine, beside=[folder])
    shorter.record_version(4, "root-4")
    assert said(shorter, 1, first=5) == [105, 106] and said(shorter, 2) == [100, 101, 102]


def test_what_a_lost_life_had_trained_does_not_count(folder):
    """Resumed at version 3, the weights of version 4 are other ones until they have been trained again, bit for bit."""
    log = TokenLog(folder)
    log.record_version(3, "root-3")
    assert said(log, 1) == [100, 101, 102, 103, 104] and said(log, 3) == []
    log = TokenLog(folder)
    log.record_version(3, "root-3")
    log.record_version(4, "root-other")
    assert said(log, 1) == [100, 101, 102, 103, 104]
    log = TokenLog(folder)
    log.record_version(3, "root-3")
    log.record_version(4, "root-4")
    assert len(said(log, 1)) == 7 and said(log, 3) == [100, 101]


def test_what_two_lives_drew_is_not_one_sample(tmp_path):
    """One drew 5 tokens under version 3 and 6 under 4; the next went back to version 3 and drew
    8 more there. Both are true; a mixture is not.
    """
    log = TokenLog(tmp_path)
    log.record_version(3, "root-3")
    log.write(rows(1, 0, 5, 3))
    log.record_version(4, "root-4")
    log.write(rows(1, 5, 3, 4))
    log.record_version(3, "root-3")
    log.write([(1, 5 + i, 7, -1.0, 900 + i, 3) for i in range(8)])
    log.close()
    again = TokenLog(tmp_path)
    again.record_version(4, "root-4")
    assert said(again, 1) == list(range(100, 108))


def routes(n: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, experts, (n, 3, 2)).astype(np.int16)


@pytest.mark.parametrize("experts", [8, 300])
def test_routes_stand_beside_their_tokens(tmp_path, experts):
    """Requests with and without, in one block; a prompt that siblings share is stored
    once a segment, and again by another life.
    """
    log, given = TokenLog(tmp_path), routes(500, experts)
    log.record_version(3, "root-3")
    step = [*rows(1, 0, 1, 3), *rows(2, 0, 1, 3), *rows(3, 0, 1, 3)]
    log.write(step, [(0, given), None, (0, given)])
    one = (tmp_path / "000003.bin").stat().st_size
    assert given.size * (1 if experts < 256 else 2) < one < given.size * (1 if experts < 256 else 2) + 500
    for i in range(1, 4):
        log.write(
            [*rows(1, i, 1, 3), *rows(3, i, 1, 3)],
            [(499 + i, routes(1, experts, i)), (499 + i, routes(1, experts, 9 + i))],
        )
    log.close()
    for sample, seed in ((1, 0), (3, 9)):
        again = TokenLog(tmp_path)
        again.record_version(3, "root-3")
        got = list(again.recall_tokens(sample, 7))
        assert [f.token for f in got] == [100, 101, 102, 103] and [f.routes[0] for f in got] == [0, 500, 501, 502]
        whole = np.concatenate([given, *(routes(1, experts, seed + i) for i in range(1, 4))])
        assert np.array_equal(np.concatenate([f.routes[1] for f in got]), whole)
        assert [f.routes for f in again.recall_tokens(2, 7)] == [None]
        again.close()
    again = TokenLog(tmp_path)
    again.record_version(3, "root-3")
    again.write(rows(4, 0, 1, 3), [(0, given)])
    again.close()
    last = TokenLog(tmp_path)
    last.record_version(3, "root-3")
    assert np.array_equal(next(last.recall_tokens(4, 7)).routes[1], given)


def damage(path, rng, first, *, torn):
    """Somewhere behind `first` bytes: cut off, or one byte another."""
    data = bytearray(path.read_bytes())
    at = int(rng.integers(first, len(data)))
    if torn:
        del data[at:]
    else:
        data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(12))
def test_a_torn_block_with_routes_ends_its_segment(tmp_path, seed):
    rng, log = np.random.default_rng(seed), TokenLog(tmp_path)
    log.record_version(3, "root-3")
    for i in range(6):
        log.write([*rows(1, i, 1, 3), *rows(2, i, 1, 3)], [(i, routes(2, 8, i)), (i, routes(2, 8, i))])
    log.close()
    damage(tmp_path / "000003.bin", rng, 60, torn=seed % 2)
    again = TokenLog(tmp_path)
    again.record_version(3, "root-3")
    for key in (1, 2):
        got = list(again.recall_tokens(key, 7))
        assert len(got) < 6 and [f.token for f in got] == [100 + i for i in range(len(got))]
        assert all(np.array_equal(f.routes[1], routes(2, 8, i)) for i, f in enumerate(got))


def test_another_model_has_another_past(folder):
    log = TokenLog(folder)
    log.record_version(3, "root-of-something-else")
    assert said(log, 1) == said(log, 2) == []


def test_a_changed_task_finds_nothing(folder):
    log = TokenLog(folder)
    log.record_version(4, "root-4")
    assert said(log, 1, prompt=TokenLog.context_hash([1, 2, 3])) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_torn_or_wrong_block_ends_its_segment_and_the_next_life_writes_behind_what_is_whole(folder, seed):
    whole = TokenLog(folder)
    whole.record_version(4, "root-4")
    everything = {key: said(whole, key) for key in (1, 2, 3)}
    damage(folder / "000003.bin", np.random.default_rng(seed), 1, torn=seed % 2)
    log = TokenLog(folder)
    log.record_version(3, "root-3")
    for key in (1, 2):
        got = said(log, key)
        assert got == everything[key][: len(got)]
    log.write(rows(BIG, 0, 6, 3))
    log.close()
    again = TokenLog(folder)
    again.record_version(3, "root-3")
    assert said(again, BIG) == [100 + i for i in range(6)]


def test_segments_do_not_pile_up(tmp_path):
    log = TokenLog(tmp_path, keep=3)
    for version in range(10):
        log.record_version(version, f"root-{version}")
    assert [p.stem for p in sorted(tmp_path.glob("*.bin"))] == ["000007", "000008", "000009"]


def test_a_token_that_is_read_back_takes_an_entry_of_an_array(tmp_path):
    """It took 203 bytes of objects. Of a past that is not this life's nothing is kept."""
    log, n = TokenLog(tmp_path), 0
    for version in range(3):
        log.record_version(version, f"root-{version}")
        for step in range(300):
            log.write([(key, 300 * version + step, 7, -1.0, key, version) for key in range(64)])
            n += 64
    log.close()
    tracemalloc.start()
    again = TokenLog(tmp_path)
    taken, _ = tracemalloc.get_traced_memory()
    again.record_version(2, "another root")
    again.close()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 64 * n and left < n and said(again, 5) == [], "less than a byte a token; other threads allocate, too"
    other = TokenLog(tmp_path)
    other.record_version(1, "root-1")
    assert said(other, 5) == [5] * 600 and said(other, 5) == []


def test_a_life_that_was_rolled_back_keeps_what_it_writes(tmp_path):
    """Segments of later versions, which a lost life wrote, do not count as newer ones."""
    log = TokenLog(tmp_path, keep=3)
    for version in range(10):
        log.record_version(version, f"root-{version}")
    log.close()
    log = TokenLog(tmp_path, keep=3)
    log.record_version(5, "root-5")
    log.write(rows(1, 0, 4, 5))
    log.close()
    again = TokenLog(tmp_path, keep=3)
    again.record_version(5, "root-5")
    assert said(again, 1) == [100, 101, 102, 103]


# -- in the engine -------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_the_log_cannot_bring_back_is_drawn_again(tmp_path):
    """Another seed, another prompt, an evaluation, a request that wants more than tokens."""
    asyncio.run(all_of(serving(tmp_path), asked(1)))
    e = serving(tmp_path)
    (r,) = asked(1)
    others = [
        replace(r, key=r.key + 1),
        replace(r, tokens=[*r.tokens, 5]),
        replace(r, namespace="eval"),
        replace(r, wants=frozenset({"raw_logprobs"})),
    ]
    for other in others:
        asyncio.run(e.generate(other))
    assert len(list(e.log.recall_tokens(r.key, e.log.context_hash(r.tokens)))) == 24


WAYS = {"plain": {}, "retracted": {"kv_pages": 90, "max_running": 4}, "chunked": {"prefill_tokens": 4}}
MIXTURES = {
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen3_moe": {
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


def routed(siblings: int = 2) -> list[Request]:
    """Groups of siblings, of a prompt each."""
    given = [
        replace(
            ask(prompt(i // siblings, 9 + i // siblings), n=24, key=sample_key(0, i, 0)), wants=frozenset({"experts"})
        )
        for i in range(6)
    ]
    return [replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in given]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"), covering(product(MIXTURES, WAYS), [("mixtral", "retracted"), ("qwen3_moe", "chunked")])
)
def test_a_mixture_goes_on_with_the_routes_that_were_recorded(tmp_path, kind, how):
    """Two crashes, the second of samples that had come back from the first: every route as if
    nothing had happened, and nothing drawn twice.
    """
    model = tiny(kind, **SIZE, **MIXTURES[kind])
    how = {"routes": True, **WAYS[how]}
    whole = asyncio.run(all_of(serving(tmp_path / "other", model, **how), routed()))
    asyncio.run(dies(serving(tmp_path / "wal", model, **how), routed()[:4], 6))
    asyncio.run(dies(serving(tmp_path / "wal", model, **how), routed()[:4], 13))
    e = serving(tmp_path / "wal", model, **how)
    drawn = counted(e)
    again = asyncio.run(all_of(e, routed()))
    assert [c.tokens for c in again] == [c.tokens for c in whole]
    assert sum(drawn) <= 6 * 24 - 4 * (6 if "kv_pages" in how else 13)  # one that waits for room is behind the others
    assert all(
        np.array_equal(a.experts, b.experts) and a.experts.dtype == b.experts.dtype
        for a, b in zip(again, whole, strict=True)
    )
    assert all(len(c.experts) == c.prompt_tokens + len(c.tokens) - 1 for c in again)
    e = serving(tmp_path / "wal", model, **how)
    e.runner.step = None  # it would break
    told = asyncio.run(all_of(e, routed()))
    assert all(np.array_equal(a.experts, b.experts) and a.tokens == b.tokens for a, b in zip(told, whole, strict=True))


@pytest.mark.slow
def test_a_sample_that_was_given_back_in_between_has_its_first_routes(tmp_path):
    """Pieces: the second reads the first's tokens once more, by new weights. Whose routes
    those are is decided as without a crash.
    """
    model = tiny("mixtral", **SIZE, **MIXTURES["mixtral"])

    async def pieces(e, crash: bool):
        async def generate(request):
            return await e.generate(request)

        call = asyncio.create_task(generate_until_done(generate, routed()[0]))
        for moment in (5, 11):
            while not e.scheduler.running or e.scheduler.running[0].noise_counter < moment:
                await asyncio.sleep(0)
            await e.pause("abort")
            with torch.no_grad():
                for p in e.loaded.model.parameters():
                    p.mul_(1.01)
            await publish_in_place(e, e.version + 1)
            await e.resume()
        if not crash:
            return await call
        while not e.scheduler.running or e.scheduler.running[0].noise_counter < 16:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return None

    whole = asyncio.run(pieces(serving(tmp_path / "other", copy.deepcopy(model), routes=True), False))
    first = serving(tmp_path / "wal", copy.deepcopy(model), routes=True)
    asyncio.run(pieces(first, True))
    log = TokenLog(tmp_path / "wal")
    e = engine(first.loaded, log=log, routes=True)
    asyncio.run(publish_in_place(e, 3))
    (again,) = asyncio.run(all_of(e, routed()[:1]))
    assert again.tokens == whole.tokens and again.versions == whole.versions and set(whole.versions) == {1, 2, 3}
    assert np.array_equal(again.experts, whole.experts)


@pytest.mark.slow
def test_a_long_log_is_read_in_little_memory(folder):
    """Nothing but where its blocks are when it opens; 16 bytes a token once a sample asks, and the sample's own tokens."""
    steps, each = 2000, 50
    log = TokenLog(folder)
    log.record_version(1, "root")
    for step in range(steps):
        log.write([(2**100 + i, step, 7, -0.5, step % 100, 1) for i in range(each)])
    log.close()
    tracemalloc.start()
    again = TokenLog(folder)
    opened = tracemalloc.get_traced_memory()[1]
    again.record_version(1, "root")
    found = list(again.recall_tokens(2**100 + 7, 7, first=3))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [token.token for token in found] == [step % 100 for step in range(3, steps)]
    n, own = steps * each, 1500 * steps  # bytes; of a sample's tokens as they are handed over
    assert opened < 20 * steps + 300_000 and held < 16 * n + own + opened and peak < 48 * n + own + opened
    assert list(again.recall_tokens(2**100 + 7, 7)) == [] and list(again.recall_tokens(5, 7)) == []


@pytest.mark.slow
def test_tokens_without_routes_are_not_enough(tmp_path):
    """Drawn when nobody wanted them: the sample begins again, and says so by its routes being whole."""
    model = tiny("mixtral", **SIZE, **MIXTURES["mixtral"])
    plain = [replace(r, wants=frozenset()) for r in routed()[:1]]
    asyncio.run(all_of(serving(tmp_path, model, routes=True), plain))
    (c,) = asyncio.run(all_of(serving(tmp_path, model, routes=True), routed()[:1]))
    assert len(c.experts) == c.prompt_tokens + len(c.tokens) - 1


@pytest.mark.slow
def test_a_killed_run_of_a_mixture_trains_the_routes_of_one_that_was_left_alone(tmp_path):
    """Killed in the middle of a step's answers. The engine's batches are other ones then, and
    with them last bits of logprobs; routes are not.
    """
    how = {
        "model__path": {"random": "qwen3_moe", **SIZE, **MIXTURES["qwen3_moe"]},
        "engine__sampling": {"max_tokens": 12}, "loop__warmup__steps": 2, "loop__steps": 3, "run__checkpoint__every": 2, "task__eval__n": 2,
    }  # fmt: skip
    run(tmp_path / "whole", **how)
    assert run_and_die(tmp_path / "run", ("GroupFinished", 2 * 8 + 2 * 4 + 2), **how) == -9
    log = TokenLog(tmp_path / "run" / "wal" / "engine-0")
    assert any(segment._known for earlier in log._lost for segment in earlier.segments)
    run(tmp_path / "run", **how)
    for n in range(3, 6):
        mine, theirs = (store.read_step(tmp_path / name, n) for name in ("run", "whole"))
        for a, b in zip(mine, theirs, strict=True):
            assert (a["tokens"], a["versions"]) == (b["tokens"], b["versions"]) and np.array_equal(
                a["experts"], b["experts"]
            )
            assert len(a["experts"]) == len(a["tokens"]) - 1
