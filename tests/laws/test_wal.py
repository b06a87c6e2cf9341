"""The token log (law 15, SPEC Y7): whole blocks only, the past that this life has, and lengths as if nothing had been interrupted."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from engine_kit import all_of, ask, engine, prompt, tiny

from rondel.models import names
from rondel.runtime.journal.wal import TokenLog
from rondel.words.types import Begin, Commit, Request, Route, sample_key

BIG = 2**128 - 9  # keys use all their bits


def rows(key: int, first: int, n: int, version: int, prompt: int = 7) -> list:
    return [(key, first + i, prompt, -0.1 * (first + i + 1), 100 + first + i, version) for i in range(n)]


def said(log: TokenLog, key: int, prompt: int = 7, first: int = 0) -> list[int]:
    return [token for token, _, _ in log.written(key, prompt, first=first)]


@pytest.fixture
def folder(tmp_path):
    """A life that served versions 3 and 4: sample 1 is of both, sample 2 of the first, sample 3 of the second."""
    log = TokenLog(tmp_path)
    log.committed(3, "root-3")
    log.write(rows(1, 0, 4, 3) + rows(2, 0, 3, 3))
    log.write(rows(1, 4, 1, 3))
    log.committed(4, "root-4")
    log.write(rows(1, 5, 2, 4) + rows(3, 0, 2, 4))
    log.close()
    return tmp_path


def test_a_sample_goes_on_from_its_tokens(folder):
    log = TokenLog(folder)
    log.committed(4, "root-4")
    got = list(log.written(1, 7))
    assert got == [(100 + i, -0.1 * (i + 1), 3 if i < 5 else 4) for i in range(7)]
    assert list(log.written(1, 7)) == []  # it is this life's now
    assert said(log, 3, first=1) == [101]
    assert said(log, 99) == []


def test_a_sample_goes_on_at_another_engine_from_one_log_alone(folder, tmp_path_factory):
    """Where two engines have drawn it, the longer one counts: a mixture of both was drawn by nobody."""
    mine = tmp_path_factory.mktemp("other")
    log = TokenLog(mine)
    log.committed(4, "root-4")
    log.write([(1, i, 7, -1.0, 900 + i, 4) for i in range(3)])
    log.close()
    log = TokenLog(mine, beside=[folder, mine])
    log.committed(4, "root-4")
    assert said(log, 1) == list(range(100, 107)) and said(log, 1) == []
    assert said(log, 3) == [100, 101]
    shorter = TokenLog(mine, beside=[folder])
    shorter.committed(4, "root-4")
    assert said(shorter, 1, first=5) == [105, 106] and said(shorter, 2) == [100, 101, 102]


def test_what_a_lost_life_had_trained_does_not_count(folder):
    """Resumed at version 3, the weights of version 4 are other ones until they have been trained again, bit for bit."""
    log = TokenLog(folder)
    log.committed(3, "root-3")
    assert said(log, 1) == [100, 101, 102, 103, 104] and said(log, 3) == []
    log = TokenLog(folder)
    log.committed(3, "root-3")
    log.committed(4, "root-other")
    assert said(log, 1) == [100, 101, 102, 103, 104]
    log = TokenLog(folder)
    log.committed(3, "root-3")
    log.committed(4, "root-4")
    assert len(said(log, 1)) == 7 and said(log, 3) == [100, 101]


def test_another_model_has_another_past(folder):
    log = TokenLog(folder)
    log.committed(3, "root-of-something-else")
    assert said(log, 1) == said(log, 2) == []


def test_a_changed_task_finds_nothing(folder):
    log = TokenLog(folder)
    log.committed(4, "root-4")
    assert said(log, 1, prompt=TokenLog.mark([1, 2, 3])) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_torn_or_wrong_block_ends_its_segment_and_the_next_life_writes_behind_what_is_whole(folder, seed):
    rng, path = np.random.default_rng(seed), folder / "000003.bin"
    data = bytearray(path.read_bytes())
    whole = TokenLog(folder)
    whole.committed(4, "root-4")
    everything = {key: said(whole, key) for key in (1, 2, 3)}
    at = int(rng.integers(1, len(data)))
    if seed % 2:
        del data[at:]
    else:
        data[at] ^= 0xFF
    path.write_bytes(data)
    log = TokenLog(folder)
    log.committed(3, "root-3")
    for key in (1, 2):
        got = said(log, key)
        assert got == everything[key][: len(got)]
    log.write(rows(BIG, 0, 6, 3))
    log.close()
    again = TokenLog(folder)
    again.committed(3, "root-3")
    assert said(again, BIG) == [100 + i for i in range(6)]


def test_segments_do_not_pile_up(tmp_path):
    log = TokenLog(tmp_path, keep=3)
    for version in range(10):
        log.committed(version, f"root-{version}")
    assert [p.stem for p in sorted(tmp_path.glob("*.bin"))] == ["000007", "000008", "000009"]


@pytest.mark.slow
def test_interrupted_lengths_are_those_of_uninterrupted_samples(tmp_path):
    """h = 0.02, q = 0.01: restarting gives a mean of 33.6 tokens, the log 50 (SPEC Y7); Kolmogorov-Smirnov tells them apart."""
    rng, h, q, n = np.random.default_rng(0), 0.02, 0.01, 4000
    log = TokenLog(tmp_path / "wal")
    log.committed(0, "root")

    def life(key: int, noise: np.random.Generator, done: int) -> tuple[int, bool]:
        """Draw until the end or an interruption. -> (tokens, finished)."""
        while True:
            if rng.random() < q:
                return done, False
            log.write([(key, done, 0, 0.0, 1, 0)])
            done += 1
            if noise.random() < h:
                return done, True

    kept, restarted = [], []
    for key in range(n):
        noise, done, finished = np.random.default_rng((1, key)), 0, False
        while not finished:
            done, finished = life(key, noise, done)
        kept.append(done)
        finished = False
        while not finished:  # another chance each time
            done, finished = life(key + n, rng, 0)
        restarted.append(done)
    log.close()
    again = TokenLog(tmp_path / "wal")
    again.committed(0, "root")
    assert all(len(said(again, key, 0)) == length for key, length in enumerate(kept))
    assert np.mean(kept) == pytest.approx(1 / h, rel=0.05)
    assert np.mean(restarted) == pytest.approx(1 / (1 - (1 - h) * (1 - q)), rel=0.05)
    limit = 1.63 / math.sqrt(n)  # 1 %
    assert ks(kept, h) < limit < ks(restarted, h)


def ks(lengths: list[int], h: float) -> float:
    """Largest distance to the geometric distribution."""
    at = np.arange(1, max(lengths) + 1)
    ours = np.searchsorted(np.sort(lengths), at, side="right") / len(lengths)
    return float(np.abs(ours - (1 - (1 - h) ** at)).max())


# -- in the engine -------------------------------------------------------------------------------


def serving(folder, loaded=None):
    """An engine of a life that serves version 1."""
    log = TokenLog(folder)
    e = engine(loaded or tiny("llama"), log=log)
    manifest = names.manifest(e.loaded.model, 1)

    async def commit():
        for message in (Begin(manifest), Route("tensor", dict(names.weights(e.loaded.model))), Commit(1, manifest.root)):
            await e.receive(message)

    asyncio.run(commit())
    return e


def asked(n: int = 6) -> list[Request]:
    return [ask(prompt(i, 7 + i), n=24, temperature=1.0, ignore_eos=i % 2 == 0, key=sample_key(0, i, 0)) for i in range(n)]


def test_an_engine_that_died_goes_on_from_its_tokens(tmp_path):
    """Tokens and logprobs as if nothing had happened, and none is drawn a second time."""
    whole = asyncio.run(all_of(serving(tmp_path / "other"), asked()))

    async def dies(e, requests):
        calls = [asyncio.create_task(e.generate(r)) for r in requests]
        while not e.scheduler.running or min(live.written for live in e.scheduler.running) < 9:
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(dies(serving(tmp_path / "wal"), asked()))
    e, drawn = serving(tmp_path / "wal"), 0
    runner = e.runner.step

    def counting(plan):
        nonlocal drawn
        out = runner(plan)
        drawn += len(out)
        return out

    e.runner.step = counting
    again = asyncio.run(all_of(e, asked()))
    assert [c.tokens for c in again] == [c.tokens for c in whole]
    assert [c.finish_reason for c in again] == [c.finish_reason for c in whole]
    for a, b in zip(again, whole):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.versions == [1] * len(a.tokens)
    total = sum(len(c.tokens) for c in whole)
    assert drawn <= total - 6 * 9


def test_a_sample_that_had_ended_is_not_asked_again(tmp_path):
    first = asyncio.run(all_of(serving(tmp_path), asked()))
    e = serving(tmp_path)
    e.runner.step = None  # it would break
    again = asyncio.run(all_of(e, asked()))
    assert [(c.tokens, c.logprobs, c.text, c.finish_reason) for c in again] == [
        (c.tokens, c.logprobs, c.text, c.finish_reason) for c in first
    ]


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
    assert len(list(e.log.written(r.key, e.log.mark(r.tokens)))) == 24
