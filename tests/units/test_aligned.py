"""Aligned numerics (law 4): the gradient, what is refused, and speculative decoding that changes no bit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from kits.aligned import DTYPES, batch_of, model, requests, told
from kits.engine import SIZE, all_of, ask, engine, prompt
from rondel.core.errors import ConfigError
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.train.annotate import annotate_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "granite_swa"])
def test_the_gradient_is_that_of_the_fast_path(kind):
    loaded = model(kind, "float32")
    tokens, at = torch.tensor(prompt(5, 40)), torch.cat([torch.arange(10), torch.arange(10, 25), torch.arange(10, 25)])
    # a norm of normalised outputs would have none
    grads, up = [], torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    for loaded.aligned in (True, False):
        loaded.model.zero_grad()
        layout = PackedLayout([PackedSegment(0, 10), PackedSegment(10, 15, 0), PackedSegment(25, 15, 0)])
        (loaded.hidden_states(tokens, at, layout) * up).sum().backward()
        grads.append([p.grad.clone() for p in loaded.model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7


def test_what_depends_on_the_batch_is_refused(monkeypatch):
    loaded = load_model({"random": "llama", **SIZE, "seed": 3}, dtype="float32")
    own = loaded.model.model.norm.forward
    loaded.model.model.norm.forward = lambda x: own(x) * (1 + 1e-6 * x.shape[1])
    with pytest.raises(ConfigError, match="numerics = 'fast'"):
        align_numerics(loaded)


def test_mixtures_are_refused_by_name():
    """A probe may hold by luck: which tokens share an expert changes with every batch."""
    with pytest.raises(ConfigError, match="mixture of experts"):
        align_numerics(
            load_model(
                {"random": "mixtral", "seed": 3, **SIZE, "num_local_experts": 4, "num_experts_per_tok": 2},
                dtype="bfloat16",
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_look_ups_change_no_bit(kind, dtype):
    """Speculative decoding only changes the shape of a step: aligned, tokens and logprobs are
    those of plain decoding.
    """
    loaded = model(kind, dtype)
    asks = [ask((prompt(i, 9) * 4)[: 20 + 5 * i], key=i, n=50, temperature=0.05) for i in range(5)]
    plain = asyncio.run(all_of(engine(loaded), asks))
    e = engine(loaded, speculation=SpeculativeDecoder(4, always=True))
    assert told(asyncio.run(all_of(e, asks))) == told(plain)
    assert 0 < e.speculation.accepted < e.speculation.proposed


@pytest.mark.slow
def test_a_draft_states_the_trainers_bits():
    loaded = model("llama", "bfloat16")
    asks = [r for r in requests() if r.sampling.max_tokens > 1]
    e = engine(
        loaded,
        speculation=SpeculativeDecoder(
            3, DraftModel(load_model({"random": "llama", "seed": 4, **SIZE}, dtype="bfloat16")), always=True
        ),
    )
    done = asyncio.run(all_of(e, asks))
    assert 0 < e.speculation.accepted < e.speculation.proposed
    b = annotate_logprobs(loaded, batch_of(asks, done), "start", budget=10_000, temperature=1.0)
    for sample in b.samples:
        assert np.array_equal(sample.known.start.numpy(), sample.known.behavior.numpy())
