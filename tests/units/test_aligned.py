"""Law 4, aligned: the same bits whatever the batch, packing, chunking or cache state,
and in the trainer's recompute.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from kits.engine import SIZE, all_of, ask, engine, idle, prompt
from kits.runs import run, steps
from kits.train import batch, row

from rondel.core.errors import ConfigError
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models.aligned_numerics import align_numerics
from rondel.models.attention import PackedLayout, PackedSegment
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.train.annotate import annotate_logprobs

WIDE = SIZE | {"head_dim": 16}
FAMILIES = {
    "llama": SIZE,
    "qwen3": WIDE,
    "gemma2": WIDE
    | {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 24},
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
}
DTYPES = ["float32", "bfloat16"]


def model(kind: str, dtype: str) -> LoadedModel:
    loaded = load_model({"random": kind, "seed": 3, **FAMILIES[kind]}, dtype=dtype)
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    align_numerics(loaded)
    return loaded


def requests(temperature: float = 1.0):
    """Three groups of four with common prompts of awkward lengths, two of which begin alike, and a stranger."""
    prompts = [prompt(0, 1), prompt(1, 37), prompt(1, 37)[:21] + prompt(2, 69)]
    asks = [
        ask(asked, key=10 * g + s, n=new, temperature=temperature)
        for g, asked in enumerate(prompts)
        for s, new in enumerate((3, 70, 17, 1))
    ]
    return [*asks, ask(prompt(9, 64), key=99, n=9, temperature=temperature)]


def told(done):
    return [(c.tokens, c.logprobs) for c in done]


def batch_of(asks, done):
    """What the engine wrote, as the trainer's batch; siblings share their prompt."""
    groups: dict[tuple, list[Trajectory]] = {}
    for request, c in zip(asks, done, strict=True):
        t = Trajectory()
        t.extend(request.tokens)
        t.extend(c.tokens, logprobs=c.logprobs, versions=c.versions)
        t.score = Score(float(len(c.tokens) % 3))
        groups.setdefault(tuple(request.tokens), []).append(t)
    return batch([Group(i, Task(f"t{i}", "fake", {}), ts, 0) for i, ts in enumerate(groups.values())], row())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.slow
def test_the_same_bits_in_every_batch_chunking_and_cache_state(kind, dtype):
    loaded = model(kind, dtype)
    asks = requests()
    alone = [c for r in asks for c in asyncio.run(all_of(engine(loaded), [r]))]
    for settings in ({"prefill_tokens": 16}, {"max_running": 3, "prefill_tokens": 7}, {"kv_pages": 170}):
        e = engine(loaded, **settings)
        order = random.Random(repr(settings)).sample(range(len(asks)), len(asks))
        for _ in range(2):  # the second time everything is found in the cache
            done = asyncio.run(all_of(e, [asks[i] for i in order]))
            assert told(done) == [(alone[i].tokens, alone[i].logprobs) for i in order], settings
        idle(e)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_trainer_recomputes_the_same_bits(kind, dtype, temperature):
    loaded = model(kind, dtype)
    asks = requests(temperature)
    done = asyncio.run(all_of(engine(loaded), asks))
    rollouts = batch_of(asks, done)
    for budget in (64, 4096):
        for share in (True, False):
            annotate_logprobs(loaded, rollouts, "start", budget=budget, temperature=temperature, share=share)
            for sample in rollouts.samples:
                assert np.array_equal(sample.known.start.numpy(), sample.known.behavior.numpy()), (budget, share)


def test_fast_numerics_do_not_have_this_property():
    """Else the tests above would prove nothing."""
    loaded = model("llama", "bfloat16")
    loaded.aligned = False
    asks = requests()
    done = asyncio.run(all_of(engine(loaded), asks))
    rollouts = batch_of(asks, done)
    annotate_logprobs(loaded, rollouts, "start", budget=4096, temperature=1.0)
    assert any(not np.array_equal(s.known.start.numpy(), s.known.behavior.numpy()) for s in rollouts.samples)


def test_the_gradient_is_that_of_the_fast_path():
    loaded = model("qwen3", "float32")
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
def test_a_run_with_aligned_numerics_has_a_gap_of_zero(tmp_path):
    run(tmp_path / "run", engine__numerics="aligned", loop__steps=3)
    gaps = [metrics["train/gap_max"] for _, _, metrics, _ in steps(tmp_path / "run") if "train/gap_max" in metrics]
    assert gaps and max(gaps) == 0.0


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
