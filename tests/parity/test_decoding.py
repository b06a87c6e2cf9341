"""Siblings that read their common context once against everyone reading everything, and the engine
with and without it.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from rondel.core.types import Request, Sampling
from rondel.generate.engine.builtin import runner
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models.dense_attention import ScoreRule
from rondel.models.load import load_model
from rondel.models.paged_layout import DecodeBatch

torch.set_num_threads(1)
PAGES, K, H, D = 200, 2, 6, 8


def laid_out(families: list[tuple[int, list[int]]], seed: int) -> tuple[DecodeBatch, DecodeBatch, torch.Tensor]:
    """[(shared tokens, own tokens of each member)] in shuffled rows. -> (whole, by family, queries)."""
    g = torch.Generator().manual_seed(seed)
    free = iter((torch.randperm(PAGES - 1, generator=g) + 1).tolist())
    rows, above = [], []
    for f, (shared, owns) in enumerate(families):
        above.append([next(free) for _ in range(shared)])
        rows += [(f, [next(free) for _ in range(n)]) for n in owns]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g).tolist()]

    def padded(lists: list[list[int]]) -> torch.Tensor:
        return torch.tensor([x + [0] * (max(map(len, lists)) - len(x)) for x in lists])

    whole = [above[f] + own for f, own in rows]
    members = [[i for i, (f, _) in enumerate(rows) if f == family] for family in range(len(families))]
    width = max(map(len, members))
    place = torch.tensor([f * width + members[f].index(i) for i, (f, _) in enumerate(rows)])
    return (
        DecodeBatch(padded(whole), torch.tensor([len(x) for x in whole])),
        DecodeBatch(
            padded([own for _, own in rows]),
            torch.tensor([len(own) for _, own in rows]),
            padded(above),
            torch.tensor([len(x) for x in above]),
            padded(members),
            place,
        ),
        torch.randn(len(rows), H, D, generator=g),
    )


@pytest.mark.parametrize("window, chunk", [(None, None), (3, None), (9, None), (None, 4)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("families", [[(5, [1, 4, 2])], [(9, [3, 3]), (4, [1]), (0, [6, 2]), (12, [1, 1, 1, 7])]])
def test_families_equal_whole_contexts(window, chunk, softcap, families):
    whole, shared, q = laid_out(families, seed=7)
    keys, values = torch.randn(2, K, PAGES, D, generator=torch.Generator().manual_seed(1))
    keys[:, 0] = values[:, 0] = 1e4  # the scratch page, with which tables are padded, must never be read
    by_head = {"sinks": torch.randn(H), "slopes": torch.rand(H)} if softcap is None else {}
    rule = ScoreRule(0.3, window, softcap, chunk, **by_head)
    exact, ours = whole.attend(q, keys, values, rule), shared.attend(q, keys, values, rule)
    assert ours.shape == (len(q), H, D) and (ours - exact).abs().max() <= 2e-6


@pytest.fixture(scope="module")
def tiny():
    return load_model(
        {
            "random": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        dtype="float32",
    )


async def here(function, *args):
    return function(*args)


def answers(loaded, share: float, monkeypatch) -> tuple[list[list[int]], list[float], int]:
    """Three groups of four with prompts of 9, 17 and 30 tokens and ends at different times; some
    prompts begin alike.
    """
    monkeypatch.setattr(runner, "SHARE", share)
    engine = BuiltinEngine(loaded, run=here, kv_pages=400, max_running=12)
    used = 0
    made = runner.ModelRunner._decoding

    def counted(self, lives):
        nonlocal used
        out = made(self, lives)
        used += out.prefix is not None
        return out

    monkeypatch.setattr(runner.ModelRunner, "_decoding", counted)
    prompts = [[1 + (i * 7 + 3) % 40 for i in range(n)] for n in (9, 17, 30)]

    async def go():
        requests = [
            Request(tokens=p, sampling=Sampling(max_tokens=3 + 2 * s, ignore_eos=True), key=100 * i + s)
            for i, p in enumerate(prompts)
            for s in range(4)
        ]
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    outs = asyncio.run(go())
    return [o.tokens for o in outs], [x for o in outs for x in o.logprobs], used


@pytest.mark.slow
def test_an_engine_that_shares_draws_the_same(tiny, monkeypatch):
    with monkeypatch.context() as m:
        plain_tokens, plain, never = answers(tiny, 0.0, m)
    with monkeypatch.context() as m:
        tokens, shared, often = answers(tiny, 10.0, m)
    assert never == 0 and often > 5, "both ways must really have run"
    assert tokens == plain_tokens and max(abs(a - b) for a, b in zip(shared, plain, strict=True)) <= 2e-6
