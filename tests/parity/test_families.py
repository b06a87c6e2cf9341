"""One module for both sides: packed training, paged serving and transformers' own attention give the same logprobs, family by family."""

from __future__ import annotations

import asyncio
import re
from functools import cache

import pytest
import torch
from engine_kit import SIZE, all_of, ask, engine, idle, plain_logits, plain_logprobs, prompt, tiny

from rondel.models.attention import PackedLayout, Segment
from rondel.models.load import _max_context, load, refuse
from rondel.words.errors import ModelError

HEAD, EXPERTS = {"head_dim": 16}, {"num_experts_per_tok": 2}
LATENT = dict(
    num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
)  # fmt: skip
FAMILIES = {
    "llama": SIZE,
    "qwen2": SIZE,
    "qwen3": SIZE | HEAD,
    "gemma2": SIZE
    | HEAD
    | {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 24},
    "gemma3_text": SIZE | HEAD | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": SIZE | {"sliding_window": 8},
    "phi3": SIZE | {"sliding_window": 8},
    "olmo2": SIZE,
    "granite": SIZE | {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "gpt_neox": {k: v for k, v in SIZE.items() if k != "num_key_value_heads"},
    "mixtral": SIZE | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": SIZE | HEAD | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    "deepseek_v3": SIZE | LATENT | EXPERTS,
    "cohere2": SIZE | {"sliding_window": 8, "logit_scale": 0.5, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": SIZE | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


@cache
def model(kind):
    return tiny(kind, **FAMILIES[kind])


def packed_logprobs(loaded, shared, tails):
    """One shared prompt, siblings after it, and a stranger before both. -> log p of every tail token, [[...], ...]."""
    stranger = prompt(99, 13)
    rows, segments, positions = [stranger, shared, *tails], [], []
    for i, row in enumerate(rows):
        start = sum(map(len, rows[:i]))
        segments.append(Segment(start, len(row), 1 if i > 1 else None))
        first = len(shared) if i > 1 else 0
        positions += range(first, first + len(row))
    tokens = torch.tensor([t for row in rows for t in row])
    with torch.no_grad():
        hidden = loaded.hidden(tokens, torch.tensor(positions), PackedLayout(segments))
        logp = loaded.head.logits(hidden).double().log_softmax(-1)
    out = []
    for segment, tail in zip(segments[2:], tails):
        sources = [segments[1].start + len(shared) - 1, *range(segment.start, segment.start + len(tail) - 1)]
        out.append([float(logp[s, t]) for s, t in zip(sources, tail)])
    return out


def gap(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_and_paged_equal_the_plain_forward(kind):
    loaded, shared = model(kind), prompt(7, 21)
    e = engine(loaded, prefill_tokens=16)
    done = asyncio.run(all_of(e, [ask(shared, key=i, n=n) for i, n in enumerate((25, 3, 14, 1))]))
    idle(e)
    tails = [c.tokens for c in done]
    plain = [plain_logprobs(loaded, shared + tail)[len(shared) - 1 :] for tail in tails]
    packed = packed_logprobs(loaded, shared, tails)
    worst = max(gap(a, b) for a, b in zip(packed, plain)), max(gap(c.logprobs, b) for c, b in zip(done, plain))
    print(f"GAP {kind}: packed {worst[0]:.1e}, paged {worst[1]:.1e}")
    assert max(worst) <= 1e-4
    assert max(plain[0]) - min(plain[0]) > 1  # neither uniform nor certain


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "mistral", "phi3", "cohere2", "olmo3"])
def test_the_window_matters_here(kind):
    """A token just outside every window of one layer's reach would change the answer if it were seen: otherwise parity proves nothing."""
    loaded = model(kind)
    row = prompt(7, 40)
    config, text = loaded.model.config, plain_logits(loaded, row)
    was, config.sliding_window = config.sliding_window, 4096
    windows = [m for m in loaded.model.modules() if getattr(m, "sliding_window", None)]
    for m in windows:
        m.sliding_window = 4096
    try:
        assert float((plain_logits(loaded, row) - text).abs().max()) > 1e-3
    finally:
        config.sliding_window = was
        for m in windows:
            m.sliding_window = was


REFUSED = {
    "bloom": ({}, "ALiBi"),
    "mpt": ({}, "ALiBi"),
    "mamba": ({}, "recurrent"),
    "rwkv": ({}, "recurrent"),
    "t5": ({}, "encoder-decoder"),
    "bart": ({}, "encoder-decoder"),
    "qwen3_next": ({}, r"recurrent layers \(linear_attention\)"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, r"recurrent layers \(conv\)"),
    "llama4_text": ({"num_local_experts": 4}, "layers of type chunked_attention"),
    "gpt_oss": ({"num_local_experts": 4, **HEAD}, "attention sinks"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(kind):
    config, missing = REFUSED[kind]
    with pytest.raises(ModelError, match=missing) as error:
        load({"random": kind, **(SIZE | config if config else {})}, dtype="float32")
    assert "vLLM or SGLang" in str(error.value)


def test_falcon_with_alibi_is_refused_and_without_it_is_not():
    from transformers import AutoConfig

    refuse(AutoConfig.for_model("falcon", alibi=False))
    with pytest.raises(ModelError, match="ALiBi"):
        refuse(AutoConfig.for_model("falcon", alibi=True))


def test_longrope_carries_the_range_in_which_a_position_means_the_same_in_every_batch():
    """Beyond it transformers takes other frequencies for the whole batch as soon as one token is there."""
    n = SIZE["hidden_size"] // SIZE["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * n,
        "long_factor": [4.0] * n,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    loaded = load({"random": "phi3", **SIZE, "original_max_position_embeddings": 64, "rope_parameters": rope}, dtype="float32")
    assert loaded.max_context == _max_context(loaded.model.config) == 64
    assert model("phi3").max_context == 512


def test_a_head_that_is_not_carried_is_noticed_at_load(monkeypatch):
    """The proof at load compares logprobs: a final softcap that the head forgot must not pass."""
    from rondel.models.head import Head

    whole = Head.of
    monkeypatch.setattr(Head, "of", lambda m: Head(whole(m).weight, scale=7.0))
    with pytest.raises(ModelError, match=re.escape("packed attention differs from the model's own by")):
        load({"random": "llama", **SIZE}, dtype="float32")
