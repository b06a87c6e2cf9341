"""Tiny models of every family that we know of: what is measured of one, and its line in docs/families.md."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kits.engine import SIZE, all_of, ask, engine, idle, prompt, tiny
from kits.runs import balances, events, run
from kits.vision import EYES
from kits.vision import recipe as seeing
from rondel.core.errors import ModelError
from rondel.models.architectures import RECURRENT_KINDS, REMEDY
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent.mixers import MIXERS

HEAD, EXPERTS, WINDOW = {"head_dim": 16}, {"num_experts_per_tok": 2}, {"sliding_window": 8}
ALONE = {k: v for k, v in SIZE.items() if k != "num_key_value_heads"}  # as many key heads as query heads
APART = {"tie_word_embeddings": False}  # tied, a random model of these is certain of the token it has just read
MIXED = SIZE | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
FEW = {"num_experts": 4, "moe_intermediate_size": 32}
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
)  # fmt: skip
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATER = {k: v for k, v in ROUTED.items() if k != "first_k_dense_replace"}  # its first layer is dense by itself
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 8}  # few heads would often score a key with zero
REUSE = {  # the last layer of three takes the keys and values of the last one of its type
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
}
NARROW = LATENT | {"num_key_value_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 8}  # latent attention of a layer
WIDER = {"per_layer_config": {1: {"head_dim": 24}}}  # heads of another size in layer 1
MIXING = SIZE | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
PURE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 4,
    "initializer_range": 0.03,
}
FAMILIES = {
    "afmoe": MIXED | HEAD | EXPERTS | FEW | {"num_dense_layers": 1},
    "apertus": SIZE,
    "arcee": SIZE,
    "aria_text": SIZE | HEAD | {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": SIZE | LATENT | LATER,
    "axk2": SIZE | LATENT | LATER | INDEX | {"n_group": None, "topk_group": None, "gated_norm_rank": 4},
    "bailing_hybrid": MIXING
    | EXPERTS
    | {k: v for k, v in (LATENT | ROUTED).items() if k not in ("q_lora_rank", "n_routed_experts")}
    | {"head_dim": 8, "num_local_experts": 4},
    "bamba": SIZE | MAMBA2 | APART | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "beam": MIXED | HEAD | EXPERTS | FEW | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "biogpt": ALONE | APART,
    "bitnet": SIZE,
    "bloom": dict(hidden_size=64, n_layer=2, n_head=4, initializer_range=0.1),
    "cohere": SIZE | {"logit_scale": 0.5},
    "cohere2": MIXED | {"logit_scale": 0.5},
    "cohere2_moe": MIXED | HEAD | EXPERTS | {"num_experts": 4, "logit_scale": 1.0},
    "cohere_compass_text": SIZE | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "ctrl": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512, dff=96),
    "cwm": MIXED,
    "dbrx": dict(
        d_model=64,
        n_layers=2,
        n_heads=4,
        max_seq_len=512,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32, "hidden_size": 64},
    ),
    "deepseek_v2": SIZE | LATENT | ROUTED,
    "deepseek_v3": SIZE | LATENT | ROUTED,
    "deepseek_v32": SIZE | LATENT | ROUTED | INDEX,
    "deepseek_v4": SIZE
    | WINDOW
    | EXPERTS
    | INDEX
    | {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5}
    | {"q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 4, "moe_intermediate_size": 32}
    | {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5}}
    | {"layer_types": ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2]}
    | {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "hc_mult": 2, "hc_sinkhorn_iters": 3, "index_topk": 4},
    "diffllama": SIZE,
    "dots1": SIZE | HEAD | ROUTED | {"n_shared_experts": 1},
    "dots3_note_text": SIZE
    | LATENT
    | LATER
    | INDEX
    | WINDOW
    | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "indexed_attention", "full_attention"]}
    | {"head_dim": 24, "per_layer_config": {0: {**NARROW, "head_dim": 16, "num_attention_heads": 2}}},
    "ernie4_5": SIZE | HEAD,
    "ernie4_5_moe": SIZE | EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": MIXED,
    "exaone_moe": MIXED | EXPERTS | FEW,
    "falcon_h1": SIZE
    | HEAD
    | MAMBA2
    | APART
    | {"mamba_d_ssm": 128, "ssm_in_multiplier": 1.5, "key_multiplier": 0.7, "lm_head_multiplier": 0.5},
    "falcon_mamba": PURE | APART,
    "flex_olmo": SIZE | EXPERTS | {"num_experts": 4},
    "flint": MIXED | HEAD | EXPERTS | FEW | {"shared_expert_intermediate_size": 32, "mlp_only_layers": []},
    "gemma": SIZE | HEAD | APART,
    "gemma2": SIZE
    | HEAD
    | WINDOW
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 24},
    "gemma3_text": MIXED | HEAD,
    "gemma3n_text": MIXED
    | HEAD
    | REUSE
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": MIXED
    | HEAD
    | REUSE
    | {"per_layer_config": {1: {"head_dim": 24}, 2: {"head_dim": 24}}, "final_logit_softcapping": 6.0}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": MIXED | HEAD | WIDER,
    "glm": SIZE | HEAD,
    "glm4": SIZE | HEAD,
    "glm4_moe": SIZE | HEAD | ROUTED,
    "glm4_moe_lite": SIZE | LATENT | LATER,
    "glm_moe_dsa": SIZE
    | LATENT
    | ROUTED
    | INDEX
    | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "gpt-sw3": OLD,
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gpt_neox": ALONE,
    "gpt_oss": MIXED | HEAD | EXPERTS | {"num_local_experts": 4},
    "granite": SIZE
    | {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "granite_swa": MIXED | HEAD | {"attention_multiplier": 0.2},
    "granitemoe": SIZE | EXPERTS | {"num_local_experts": 4},
    "granitemoe_swa": MIXED | EXPERTS | {"num_local_experts": 4},
    "granitemoehybrid": MIXING
    | MAMBA2
    | EXPERTS
    | {"num_local_experts": 4, "shared_intermediate_size": 32, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "granitemoeshared": SIZE | EXPERTS | {"num_local_experts": 4, "shared_intermediate_size": 32},
    "helium": SIZE | HEAD,
    "hrm_text": {k: v for k, v in ALONE.items() if k != "num_hidden_layers"}
    | HEAD
    | {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2},
    "hunyuan_v1_dense": SIZE | HEAD,
    "hunyuan_v1_moe": SIZE | HEAD | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": SIZE | HEAD | EXPERTS | FEW,
    "hy_v4": SIZE | LATENT | LATER | INDEX | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "hyperclovax": SIZE | HEAD,
    "internlm3": SIZE | HEAD,
    "iquestcoder": SIZE | HEAD,
    "jais2": SIZE | HEAD,
    "jamba": SIZE
    | EXPERTS
    | APART
    | {
        "num_hidden_layers": 3,
        "num_experts": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "jetmoe": dict(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=16,
        max_position_embeddings=512,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "kimi_linear": MIXING
    | LATENT
    | EXPERTS
    | {"num_experts": 4, "num_shared_experts": 1, "moe_intermediate_size": 32}
    | {"linear_head_dim": 8, "linear_num_heads": 4},
    "kolibri1": {k: v for k, v in (MIXED | HEAD | EXPERTS | FEW).items() if k != "intermediate_size"},
    "laguna": MIXED | HEAD | EXPERTS | FEW,
    "lfm2": SIZE | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": SIZE
    | EXPERTS
    | FEW
    | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "lfm3": SIZE
    | HEAD
    | WINDOW
    | {"num_hidden_layers": 4, "layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    "llama": SIZE,
    "llama4_text": SIZE
    | HEAD
    | EXPERTS
    | {"num_local_experts": 4, "attention_chunk_size": 8, "no_rope_layers": [1, 0], "floor_scale": 8}
    | {"intermediate_size_mlp": 96},
    "longcat_flash": LATENT
    | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 512, "num_layers": 1}
    | {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "n_routed_experts": 3, "zero_expert_num": 1, "moe_topk": 2},
    "mamba": PURE | APART,
    "mamba2": {k: v for k, v in PURE.items() if k != "time_step_rank"}
    | {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mellum": MIXED | HEAD | EXPERTS | FEW,
    "mimo_v2_flash": {k: v for k, v in (MIXED | HEAD | ROUTED).items() if k != "first_k_dense_replace"}
    | {"v_head_dim": 12},
    "minicpm3": SIZE | LATENT | APART | {"dim_model_base": 32},
    "minimax": MIXING | HEAD | EXPERTS | {"num_local_experts": 4, "block_size": 16},
    "minimax_m2": SIZE | HEAD | EXPERTS | {"num_local_experts": 4},
    "minimax_m3_vl_text": SIZE | HEAD | EXPERTS | {"num_local_experts": 4},
    "ministral": SIZE | HEAD | WINDOW,
    "ministral3": SIZE | HEAD,
    "mistral": SIZE | WINDOW,
    "mixtral": SIZE | EXPERTS | {"num_local_experts": 4},
    "mpt": dict(d_model=64, n_layers=2, n_heads=4, max_seq_len=512, attn_config={"clip_qkv": 2.0}),
    "nanochat": SIZE,
    "nemotron": SIZE,
    "nemotron_h": {k: v for k, v in SIZE.items() if k != "num_hidden_layers"}
    | HEAD
    | EXPERTS
    | {k: v for k, v in ROUTED.items() if k != "first_k_dense_replace"}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4}
    | {"moe_shared_expert_intermediate_size": 32},
    "olmo": SIZE | {"clip_qkv": 2.0},
    "olmo2": SIZE,
    "olmo3": MIXED,
    "olmo_hybrid": MIXING | LINEAR | APART,
    "olmoe": SIZE | EXPERTS | {"num_experts": 4, "clip_qkv": 2.0},
    "opt": dict(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=64,
    ),
    "persimmon": ALONE,
    "phi": SIZE,
    "phi3": SIZE | WINDOW,
    "phimoe": SIZE | EXPERTS | {"num_local_experts": 4},
    "qwen2": SIZE,
    **{kind: {k: v for k, v in seeing(kind).items() if k != "random"} for kind in EYES},
    "qwen2_moe": SIZE | EXPERTS | FEW | {"shared_expert_intermediate_size": 32},
    "qwen3": SIZE | HEAD,
    "qwen3_5_moe_text": {k: v for k, v in MIXING.items() if k != "intermediate_size"}
    | LINEAR
    | HEAD
    | EXPERTS
    | FEW
    | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": MIXING | LINEAR | HEAD,
    "qwen3_moe": SIZE | HEAD | EXPERTS | FEW,
    "qwen3_next": MIXING | LINEAR | HEAD | EXPERTS | FEW | {"shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {k: v for k, v in MIXING.items() if k != "intermediate_size"}
    | LINEAR
    | HEAD
    | EXPERTS
    | FEW
    | {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 8}
    | {"shared_expert_intermediate_size": 32, "ple_layer_ids": [1], "heads_per_ngram": 4, "ngram_vocab_size_base": 40}
    | {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2}
    | {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12}
    | {"indexer_compress_ratio": 3},
    "recurrent_gemma": {k: v for k, v in SIZE.items() if k != "max_position_embeddings"}
    | WINDOW
    | {"num_hidden_layers": 3, "num_key_value_heads": 1, "block_types": ["recurrent", "attention", "recurrent"]},
    "rwkv": dict(hidden_size=64, num_hidden_layers=2, context_length=512),
    "seed_oss": SIZE | HEAD,
    "smollm3": SIZE | {"no_rope_layers": [1, 0]},
    "solar_open": {
        k: v for k, v in (SIZE | HEAD | ROUTED).items() if k not in ("intermediate_size", "first_k_dense_replace")
    },
    "stablelm": SIZE,
    "starcoder2": SIZE | WINDOW,
    "vaultgemma": MIXED | HEAD | APART,
    "xlstm": dict(hidden_size=64, num_hidden_layers=2, num_heads=4, qk_dim_factor=1.0),
    "youtu": SIZE | LATENT,
    "zamba": SIZE
    | APART
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    }
    | {"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": SIZE
    | APART
    | {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
    }
    | {"num_key_value_heads": 4, "mamba_d_state": 16, "mamba_ngroups": 2, "n_mamba_heads": 8, "num_mem_blocks": 2}
    | {"use_shared_attention_adapter": True, "adapter_rank": 8, "use_mem_rope": True},
    "zaya": {k: v for k, v in SIZE.items() if k != "intermediate_size"}
    | HEAD
    | WINDOW
    | {"layer_types": ["hybrid_sliding", "hybrid"], "num_experts": 4, "moe_intermediate_size": 32}
    | {"router_hidden_size": 16},
}

ENCODERS = "bert-generation camembert data2vec-text electra ernie roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod"
SEQUENCE_TO_SEQUENCE = "bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet whisper"
OUTSIDE = "big_bird blt cpmant git megatron-bert reformer rembert roformer trocr xlm"
RECURRENT_FAMILIES = [kind for kind in FAMILIES if kind in RECURRENT_KINDS]
INTERFACE = "attention interface"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # a config of it -> what the reason speaks of
    **{kind: ({}, "an encoder") for kind in ENCODERS.split()},
    **{kind: ({}, "encoder-decoder") for kind in SEQUENCE_TO_SEQUENCE.split()},
    **{kind: ({}, "attention interface") for kind in OUTSIDE.split()},
    "bart": ({}, "encoder-decoder"),
    "bert": ({}, "an encoder"),
    "codegen": ({}, INTERFACE),
    "doge": ({}, "mask of its own"),
    "falcon": ({}, INTERFACE),
    "gpt_neo": ({}, INTERFACE),
    "gpt_neox_japanese": ({}, INTERFACE),
    "gptj": ({}, INTERFACE),
    "inkling2_text": ({}, "learned bias for each query"),
    "inkling_text": ({}, "learned bias for each query"),
    "llava": ({}, "looks at images in a way of its own"),
    "modernbert-decoder": ({"pad_token_id": 0}, "head"),
    "openai-gpt": ({}, INTERFACE),
    "qwen4_exp": ({}, "its tower and its three rows of positions"),
    "roberta": ({}, "an encoder"),
    "t5": ({}, "encoder-decoder"),
    "xglm": ({}, INTERFACE),
    "xlnet": ({}, INTERFACE),
}
PARTS = {  # what no key of these configs says
    **dict.fromkeys(("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), "attention sinks"),
    **dict.fromkeys(("bloom", "mpt"), "ALiBi"),
    **dict.fromkeys(("zamba", "zamba2"), "shared attention blocks with keys and values of each layer that calls"),
    "deepseek_v4": "attention sinks, windows compressed to keys, several residual streams, hash routing",
    "diffllama": "differential attention",
    "hrm_text": "stacks run several times with keys and values of each run, prompts are read causally",
}
NOTES = {  # a key of its config -> what it brings
    "sliding_window": "sliding window",
    "attention_chunk_size": "chunked attention",
    "attn_logit_softcapping": "softcapped scores and logits",
    "index_topk": "indexers choose the keys",
    "indexer_budget": "indexers choose blocks of keys, several residual streams",
    "kv_lora_rank": "latent attention, cached as latents",
    "num_kv_shared_layers": "the last layers reuse keys and values",
    "per_layer_config": "head sizes differ by layer",
    "no_rope_layers": "some layers without positions",
    "vision_config": "sees images",
}

STATES = {  # a mixer's forward pass -> what it keeps a state of
    "forward_short_conv": "short convolutions keep a state",
    "forward_convolved_qkv": "queries, keys and values look back a few tokens, which are a state",
    "forward_gated_delta": "gated delta rule keeps a state",
    "forward_kimi_delta": "gated delta rule with a decay for each channel keeps a state",
    "forward_ngram_layer": "embedded n-grams keep the last tokens",
    "forward_lightning": "lightning attention keeps a state",
    "forward_mamba2": "Mamba-2 layers keep a state",
    "forward_mamba_heads": "Mamba layers with several heads keep a state",
    "forward_rg_lru": "RG-LRU layers keep a state",
    "forward_wkv": "WKV layers keep a state",
    "forward_channel_mix": "feed-forward parts keep the last token",
    "forward_mlstm": "matrix memories keep a state",
    "forward_mamba": "Mamba layers keep a state",
}

LINES = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8").splitlines()


def one_of_each(preferred: Collection[str]) -> list[str]:
    """A family for each note of docs/families.md, dense and as a mixture: what is ours in a family is said there. The
    others of a line are transformers' own modules around it.
    """
    found: dict[tuple[str, ...], str] = {}
    notes = {line.split("`")[1]: tuple(line.split("|")[4:6]) for line in LINES if line.startswith("| `")}
    for kind in sorted(FAMILIES, key=lambda kind: kind not in preferred):
        found.setdefault(notes.get(kind, (kind,)), kind)  # make_families.py has not written the line of a new one yet
    return [kind for kind in FAMILIES if kind in found.values()]


# in the fast tests: one of each kind of attention and routing
AT_ONCE = ("llama", "lfm2", "gemma3_text", "deepseek_v3", "qwen3_moe", "gpt2")
ONE_OF_EACH = one_of_each([*AT_ONCE, "gemma3n_text", "qwen3_5_text"])


@cache
def model(kind: str) -> LoadedModel:
    return tiny(kind, **FAMILIES[kind])


@cache
def own(kind: str) -> Any:
    """The same weights in a fresh module of transformers, with its own attention; nothing of ours runs in it."""
    loaded = model(kind)
    config = copy.deepcopy(loaded.model.config)
    fresh = type(loaded.model)._from_config(config, attn_implementation="eager").float().eval()
    fresh.load_state_dict(loaded.model.state_dict())
    fresh.generation_config.eos_token_id = None
    return fresh


@torch.no_grad()
def rounding_noise(kind: str, tokens: list[int], drawn: int) -> float:
    """Largest error of transformers' own fp32 logprobs of the last `drawn` tokens, against the same module in fp64.

    It grows with the logits: those of a random youtu, whose matrices start four times as large as deepseek_v3's, reach
    52 and are off by 7.5e-5; deepseek_v3's reach 5 and are off by 1.5e-6.
    """
    whole, row = own(kind), torch.tensor(tokens)
    exact = copy.deepcopy(whole)
    exact.set_experts_implementation("eager")  # grouped products know no fp64
    narrow, wide = (m(row[None], use_cache=False).logits[0] for m in (whole, exact.double()))
    picked = [x[:-1].double().log_softmax(-1).gather(1, row[1:, None])[-drawn:] for x in (narrow, wide)]
    return float((picked[0] - picked[1]).abs().max())


GREEDY = 4  # tokens of an answer that is compared with `generate`


@dataclass(frozen=True)
class Measured:
    greedy: bool  # the engine's tokens are those of `generate`
    gap: float  # largest difference of a raw logprob to a plain forward pass
    # the same for a packed pass that repeats the engine's choice of experts; None for a dense model
    replayed: float | None = None
    obeyed: bool = True  # and another choice gives another answer


@cache
@torch.no_grad()
def measure(kind: str) -> Measured:
    """Two prompts at once through the engine, each on its own through transformers: `generate` continues the first,
    and a forward pass has the likeliest token at each place of both.
    """
    loaded, fresh = model(kind), own(kind)
    wants = frozenset({"raw_logprobs", "experts"} if loaded.routers else {"raw_logprobs"})
    given = [prompt(7, 21), prompt(8, 9)]
    e = engine(loaded, prefill_tokens=16, routes=bool(loaded.routers))
    done = asyncio.run(all_of(e, [replace(ask(p, n=GREEDY, temperature=0.0), wants=wants) for p in given]))
    idle(e)
    whole = [torch.tensor(p + c.tokens) for p, c in zip(given, done)]
    plain = [fresh(w[None], use_cache=False).logits[0] for w in whole]
    greedy = _generated(fresh, given[0]) == done[0].tokens
    greedy &= all(x[-GREEDY - 1 : -1].argmax(-1).tolist() == c.tokens for x, c in zip(plain, done))
    gap = max(_gap(x, w, c.raw_logprobs) for x, w, c in zip(plain, whole, done))
    if not loaded.routers:
        return Measured(greedy, gap)
    routes = [torch.from_numpy(c.experts).long() for c in done]
    same, other = (
        max(
            _replayed(loaded, w, _moved(r, loaded.routers, step), c.raw_logprobs)
            for w, r, c in zip(whole, routes, done)
        )
        for step in (0, 1)
    )
    return Measured(greedy, gap, same, other > 1e-3)


def _generated(fresh: Any, given: list[int]) -> list[int]:
    row = torch.tensor([given])
    how = {"do_sample": False, "max_new_tokens": GREEDY, "pad_token_id": 0}
    out = fresh.generate(row, attention_mask=torch.ones_like(row), **how)
    return out[0, len(given) :].tolist()


def _moved(routes: torch.Tensor, routers: int, step: int) -> torch.Tensor:
    """Other experts of four; the keys that indexers chose stay."""
    return torch.cat([(routes[:, :routers] + step) % 4, routes[:, routers:]], 1)


def _replayed(loaded: LoadedModel, tokens: torch.Tensor, routes: torch.Tensor, logprobs: list[float]) -> float:
    n = len(routes)
    hidden = loaded.hidden_states(
        tokens[:n], torch.arange(n), PackedLayout([PackedSegment(0, n)]), loaded.routing_tape(routes)
    )
    return _gap(loaded.head.logits(hidden), tokens, logprobs)


def _gap(logits: torch.Tensor, tokens: torch.Tensor, logprobs: list[float]) -> float:
    """logits [T or T-1, V] of tokens [T] against the logprobs of the last ones."""
    logp = logits[: len(tokens) - 1].double().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return float((logp[-len(logprobs) :] - torch.tensor(logprobs)).abs().max())


def recurrences(kind: str) -> list[str]:
    """Which of its layers keep a state."""
    mixers = {MIXERS[name].__name__ for m in model(kind).model.modules() if (name := type(m).__name__) in MIXERS}
    return [STATES[mixer] for mixer in sorted(mixers)]


def refusal(kind: str) -> str:
    """What `load` says instead of loading."""
    try:
        load_model({"random": kind, **REFUSED[kind][0]}, dtype="float32")
    except ModelError as error:
        return str(error)
    raise AssertionError(f"{kind} was loaded")


def row(kind: str) -> str:
    """| family | greedy | gap | replay | note |: bounds rather than figures, so that
    every machine writes the same line.
    """
    if kind in REFUSED:
        why = refusal(kind).partition("is not supported: ")[2].partition(f". {REMEDY}")[0]
        return f"| `{kind}` | refused | | | {why} |"
    m = measure(kind)
    replay = "dense" if m.replayed is None else "yes" if m.replayed <= 1e-4 and m.obeyed else "no"
    notes = ", ".join(
        [
            *filter(None, [PARTS.get(kind)]),
            *(note for key, note in NOTES.items() if key in FAMILIES[kind]),
            *recurrences(kind),
        ]
    )
    return f"| `{kind}` | {'equal' if m.greedy else 'differs'} | {'≤ 1e-4' if m.gap <= 1e-4 else f'{m.gap:.0e}'} | {replay} | {notes} |"


def run_tiny_recipe(kind: str, folder: Path) -> None:
    """A supervised step and two steps of RL of a random model, asynchronous; the ledger balances."""
    config = {f"model.path.{key}": value for key, value in FAMILIES[kind].items()}
    short = {
        "loop.steps": 2,
        "loop.warmup.steps": 1,
        "loop.max_staleness": 1,
        "algo.correction.kind": "importance",
        "model.path.max_position_embeddings": 64,
    }
    done = run(folder, **{"model.path.random": kind, **config, **short})
    assert done and len(events(folder, "StepDone")) == 3
    assert balances(events(folder, "StepDone")[-1]["ledger"])
