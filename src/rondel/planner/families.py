"""Data: what each family's config leaves unsaid, and the shapes of public models with where they stand.

DEFAULTS  as transformers' configs have them, and facts that stand in no config: `norms` of width D a
          layer, `qk_norm`, which projections and experts have biases (`qkv_bias`, `o_bias`,
          `expert_bias`), attention `sinks`, an `output_gate` as
          wide as the queries, a `shared_expert_gate`, the `mixer` of recurrent layers
MODELS    name -> (config, source);  PUBLIC  other names, also plain sizes: the model that is usually meant
"""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
_QWEN = {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936}
_QWEN2_VL = {
    **_QWEN,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
}
_GEMMA = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "own_head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "tie_word_embeddings": True,
    "norms": 4,
}
_QWEN3_5 = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "own_head_dim": 256,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
    "qk_norm": True,
    "output_gate": True,
    "mixer": "gated delta",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5_DENSE = {**_QWEN3_5, "intermediate_size": 12288}
_QWEN3_5_MOE = {
    **_QWEN3_5,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "shared_expert_gate": True,
}
_DEEPSEEK = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_MISTRAL = {**_LLAMA, "num_key_value_heads": 8, "intermediate_size": 14336}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {**_QWEN, "qkv_bias": True},
    "qwen3": {**_QWEN, "own_head_dim": 128, "qk_norm": True},
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "qk_norm": True,
    },
    "qwen2_vl": {**_QWEN2_VL, "qkv_bias": True},
    "qwen2_5_vl": {**_QWEN2_VL, "qkv_bias": True},
    "qwen3_vl": {**_QWEN, "own_head_dim": 128, "qk_norm": True},
    **dict.fromkeys(("idefics3", "smolvlm"), _LLAMA),
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, "vocab_size": 262208, "qk_norm": True},
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "qk_norm": True},
    "phi3": {**_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064},
    "gpt_oss": {
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "own_head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "expert_bias": True,
        "sinks": True,
    },
    "glm4_moe": {
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "own_head_dim": 128,
        "intermediate_size": 10944,
        "vocab_size": 151552,
        "tie_word_embeddings": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "o_bias": False,
    },
    "qwen3_vl_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "qk_norm": True,
    },
    "qwen3_5_text": _QWEN3_5_DENSE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5": _QWEN3_5_DENSE,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    "glm_moe_dsa": {
        **_DEEPSEEK,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 12288,
        "vocab_size": 154880,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
    },
    "kimi_linear": {
        **_DEEPSEEK,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 9216,
        "vocab_size": 163840,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "mixer": "kimi delta",
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "minimax": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2, "mixer": "lightning"},
}


def _dense_config(
    kind: str, hidden: int, layers: int, heads: int, kv: int, feed: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": feed,
        "vocab_size": vocab,
        **more,
    }


def _moe_config(hidden: int, layers: int, heads: int, kv: int, expert: int) -> dict[str, Any]:
    return _dense_config(
        "qwen3_moe", hidden, layers, heads, kv, 6144, 151936, head_dim=128, moe_intermediate_size=expert
    )


def _gemma3_config(
    hidden: int, layers: int, heads: int, kv: int, feed: int, head: int, vocab: int = 262208
) -> dict[str, Any]:
    return _dense_config("gemma3_text", hidden, layers, heads, kv, feed, vocab, head_dim=head)


def _with_tower(model: dict[str, Any], **tower: Any) -> dict[str, Any]:
    return {**model, "vision_config": tower}


_HUB = "config.json on the hub: "
_UNREAD = "from memory, only the total of its parameters is checked: "
_TEXT = "its text model alone"
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "smollm2-135m": (
        _dense_config("llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
        _HUB + "HuggingFaceTB/SmolLM2-135M",
    ),
    "qwen2.5-0.5b": (
        _dense_config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
        _HUB + "Qwen/Qwen2.5-0.5B",
    ),
    "qwen2.5-1.5b": (
        _dense_config("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
        _HUB + "Qwen/Qwen2.5-1.5B",
    ),
    "qwen2.5-3b": (
        _dense_config("qwen2", 2048, 36, 16, 2, 11008, 151936, tie_word_embeddings=True),
        _HUB + "Qwen/Qwen2.5-3B",
    ),
    "qwen2.5-7b": (_dense_config("qwen2", 3584, 28, 28, 4, 18944, 152064), _HUB + "Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": (_dense_config("qwen2", 5120, 48, 40, 8, 13824, 152064), _HUB + "Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": (_dense_config("qwen2", 5120, 64, 40, 8, 27648, 152064), _HUB + "Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": (_dense_config("qwen2", 8192, 80, 64, 8, 29568, 152064), _HUB + "Qwen/Qwen2.5-72B"),
    "qwen3-0.6b": (
        _dense_config("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
        _HUB + "Qwen/Qwen3-0.6B",
    ),
    "qwen3-4b": (
        _dense_config("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
        _HUB + "Qwen/Qwen3-4B",
    ),
    "qwen3-8b": (_dense_config("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), _HUB + "Qwen/Qwen3-8B"),
    "qwen3-14b": (_dense_config("qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128), _HUB + "Qwen/Qwen3-14B"),
    "qwen3-32b": (_dense_config("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128), _HUB + "Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": (_moe_config(2048, 48, 32, 4, 768), _HUB + "Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": (_moe_config(4096, 94, 64, 4, 1536), _HUB + "Qwen/Qwen3-235B-A22B"),
    "qwen2-vl-2b": (
        _with_tower(
            _dense_config("qwen2_vl", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True), hidden_size=1536
        ),
        _HUB + "Qwen/Qwen2-VL-2B-Instruct",
    ),
    "qwen2-vl-7b": (
        _with_tower(_dense_config("qwen2_vl", 3584, 28, 28, 4, 18944, 152064), hidden_size=3584),
        _HUB + "Qwen/Qwen2-VL-7B-Instruct",
    ),
    "qwen2.5-vl-3b": (
        _with_tower(
            _dense_config("qwen2_5_vl", 2048, 36, 16, 2, 11008, 151936, tie_word_embeddings=True),
            hidden_size=1280,
            out_hidden_size=2048,
        ),
        _HUB + "Qwen/Qwen2.5-VL-3B-Instruct",
    ),
    "qwen2.5-vl-7b": (
        _with_tower(
            _dense_config("qwen2_5_vl", 3584, 28, 28, 4, 18944, 152064), hidden_size=1280, out_hidden_size=3584
        ),
        _HUB + "Qwen/Qwen2.5-VL-7B-Instruct",
    ),
    "qwen3-vl-4b": (
        _with_tower(
            _dense_config("qwen3_vl", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
            depth=24,
            hidden_size=1024,
            intermediate_size=4096,
            out_hidden_size=2560,
            deepstack_visual_indexes=(5, 11, 17),
        ),
        _HUB + "Qwen/Qwen3-VL-4B-Instruct",
    ),
    "qwen3-vl-8b": (
        _with_tower(_dense_config("qwen3_vl", 4096, 36, 32, 8, 12288, 151936, head_dim=128), out_hidden_size=4096),
        _HUB + "Qwen/Qwen3-VL-8B-Instruct",
    ),
    "gemma-3-270m": (_gemma3_config(640, 18, 4, 1, 2048, 256, 262144), _UNREAD + "google/gemma-3-270m"),
    "gemma-3-1b": (_gemma3_config(1152, 26, 4, 1, 6912, 256, 262144), _HUB + "google/gemma-3-1b-it"),
    "gemma-3-4b": (_gemma3_config(2560, 34, 8, 4, 10240, 256), _UNREAD + "google/gemma-3-4b-it, " + _TEXT),
    "gemma-3-12b": (_gemma3_config(3840, 48, 16, 8, 15360, 256), _UNREAD + "google/gemma-3-12b-it, " + _TEXT),
    "gemma-3-27b": (_gemma3_config(5376, 62, 32, 16, 21504, 128), _HUB + "google/gemma-3-27b-it, " + _TEXT),
    "phi-4": (_dense_config("phi3", 5120, 40, 40, 10, 17920, 100352), _UNREAD + "microsoft/phi-4"),
    "phi-4-mini": (
        _dense_config("phi3", 3072, 32, 24, 8, 8192, 200064, tie_word_embeddings=True),
        _UNREAD + "microsoft/Phi-4-mini-instruct",
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
        _HUB + "openai/gpt-oss-20b, planned in 16 bits",
    ),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, _HUB + "openai/gpt-oss-120b, planned in 16 bits"),
    "glm-4.5-air": (
        {"model_type": "glm4_moe", "attention_bias": True},
        _HUB + "zai-org/GLM-4.5-Air, without the layer that guesses ahead",
    ),
    "glm-4.5": (
        _dense_config(
            "glm4_moe",
            5120,
            92,
            96,
            8,
            12288,
            151552,
            n_routed_experts=160,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
            attention_bias=True,
            use_qk_norm=True,
        ),
        _HUB + "zai-org/GLM-4.5, without the layer that guesses ahead",
    ),
    "qwen3.5-27b": (
        _dense_config("qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, linear_num_value_heads=48),
        "THUDM/slime scripts/models/qwen3.5-27B.sh; its linear_num_value_heads = 48 is not verified; " + _TEXT,
    ),
    "qwen3.5-397b-a17b": (
        _dense_config(
            "qwen3_5_moe_text",
            4096,
            60,
            32,
            2,
            0,
            248320,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            linear_num_value_heads=64,
        ),
        "NVIDIA Megatron-LM's configuration of Qwen3.5-397B-A17B; widths of experts and "
        "linear_num_value_heads = 64 are not verified; " + _TEXT,
    ),
    "llama3-8b": (_dense_config("llama", 4096, 32, 32, 8, 14336, 128256), _HUB + "meta-llama/Meta-Llama-3-8B"),
    "llama3-70b": (_dense_config("llama", 8192, 80, 64, 8, 28672, 128256), _HUB + "meta-llama/Meta-Llama-3-70B"),
    "llama3.1-405b": (_dense_config("llama", 16384, 126, 128, 8, 53248, 128256), _HUB + "meta-llama/Llama-3.1-405B"),
    "mixtral-8x7b": (_dense_config("mixtral", 4096, 32, 32, 8, 14336, 32000), _HUB + "mistralai/Mixtral-8x7B-v0.1"),
    "deepseek-v3": (
        {"model_type": "deepseek_v3"},
        _HUB + "deepseek-ai/DeepSeek-V3, without the layer that guesses ahead",
    ),
}

PUBLIC = {
    "135m": "smollm2-135m",
    "0.5b": "qwen2.5-0.5b",
    "0.6b": "qwen3-0.6b",
    "1.5b": "qwen2.5-1.5b",
    "3b": "qwen2.5-3b",
    "4b": "qwen3-4b",
    "7b": "qwen2.5-7b",
    "8b": "llama3-8b",
    "14b": "qwen3-14b",
    "30b-a3b": "qwen3-30b-a3b",
    "32b": "qwen3-32b",
    "70b": "llama3-70b",
    "72b": "qwen2.5-72b",
    "235b-a22b": "qwen3-235b-a22b",
    "235b": "qwen3-235b-a22b",
    "405b": "llama3.1-405b",
    "671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "meta-llama-3-8b": "llama3-8b",
    "meta-llama-3-70b": "llama3-70b",
    "llama-3.1-8b": "llama3-8b",
    "llama-3.1-70b": "llama3-70b",
    "llama-3.3-70b": "llama3-70b",
    "llama-3.1-405b": "llama3.1-405b",
    "smollm2-135m": "smollm2-135m",
    "gemma-3-1b-it": "gemma-3-1b",
    "gemma-3-4b-it": "gemma-3-4b",
    "gemma-3-12b-it": "gemma-3-12b",
    "gemma-3-27b-it": "gemma-3-27b",
    "20b": "gpt-oss-20b",
    "120b": "gpt-oss-120b",
    "27b": "gemma-3-27b",
    "397b": "qwen3.5-397b-a17b",
}
