"""Megatron-Core's own GPTModel on a CPU: what it asks of CUDA beside computing is answered here."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F


@contextlib.contextmanager
def megatron_on_cpu(tmp_path: Path):
    """A world of one rank. Skips where megatron-core is not installed."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # 0.16 asks for it where there is no such package
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        patch.undo()


def gpt_model(config: Any) -> Any:
    """What Megatron's own converters build for this config of transformers, without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    more: dict[str, Any] = {}
    if experts:
        wide = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        more = {
            "num_moe_experts": experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": wide,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    norms = config.model_type in ("qwen3", "qwen3_moe")
    how = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **more,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=experts or None, qk_layernorm=norms)
    if experts:  # with Transformer Engine, which all use, this norm has a name of its own
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return GPTModel(
        how,
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta") or config.rope_theta,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[1, T] -> [1, T, V]."""
    n = tokens.shape[1]
    hidden = torch.triu(torch.ones(1, 1, n, n, dtype=torch.bool), 1)
    return model(tokens, torch.arange(n)[None], hidden)
