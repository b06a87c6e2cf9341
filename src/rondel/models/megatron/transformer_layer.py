"""Megatron-Core's `TransformerLayer` for a config of transformers: its own parts, with the norms, the attention and
the router of this system in them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.models.attention import rondel_attention
from rondel.models.cpu_kernels import rotate_pair
from rondel.models.routing_tape import expert_count

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine and Apex are missing, and not used here
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig


def build_layer(config: Any, group: Any) -> nn.Module:
    """Megatron's layer of a model with this config of transformers, on "meta"; `group`: ranks that it is cut over."""
    axes = ("tp", "pp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
    groups = ProcessGroupCollection(**dict.fromkeys(axes) | {"tp": group})
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # of defaults of its own that are deprecated
        settings, spec = _megatron_config(config, 1 if group is None else group.size()), _layer_spec(config)
        layer: nn.Module = build_module(spec, config=settings, layer_number=1, pg_collection=groups)
    for module in layer.modules():
        if group is None and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.explicit_expert_comm = True  # whoever is alone has nobody to sum with, and need not have a group
    return layer.eval()


def _megatron_config(config: Any, tp: int) -> Any:
    mixture: dict[str, Any] = {}
    if experts := expert_count(config):
        mixture = {
            "num_moe_experts": experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=_has_head_norms(config),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **mixture,
    )


def _layer_spec(config: Any) -> Any:
    """Megatron's own, without Transformer Engine, and with what follows here in it."""
    experts, norms = expert_count(config), _has_head_norms(config)
    spec = get_gpt_layer_local_spec(num_experts=experts or None, qk_layernorm=norms, normalization="RMSNorm")
    parts, attention = spec.submodules, spec.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    parts.self_attn_bda = parts.mlp_bda = residual_sum
    attention.core_attention = PackedAttention
    if norms:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if experts:
        parts.mlp.submodules.router = TapedRouter
    return spec


def _has_head_norms(config: Any) -> bool:
    return config.model_type in ("qwen3", "qwen3_moe")


class RmsNorm(nn.Module):
    """Of a residual stream that may be fp32 beside weights of 16 bits (models/fp32_sums.py), in the dtype of these."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


def residual_sum(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """In the dtype of the stream; Megatron's own rounds the stream to that of the branch. Nothing is dropped."""

    def add(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + branch[0]

    return add


class PackedAttention(nn.Module):
    """Megatron's core attention as the layout in force computes it. `settings`: the attention of transformers of this
    layer, and cosine and sine of the row's positions.
    """

    settings: tuple[Any, Tensor, Tensor]

    def __init__(self, **how: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, /, **how: Any) -> Tensor:
        """[T, 1, heads, D] each -> [T, 1, heads · D]."""
        attention, cosine, sine = self.settings
        plain = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        q, k = rotate_pair(plain, q, k, cosine, sine)
        window = getattr(
            attention if hasattr(attention, "sliding_window") else attention.config, "sliding_window", None
        )
        out, _ = rondel_attention(attention, q, k, v, scaling=attention.scaling, sliding_window=window)
        return out.flatten(2).transpose(0, 1)


class TapedRouter(nn.Module):
    """The router of transformers in Megatron's mixture, so that routes are replayed (models/routing_tape.py).
    `gate`: that of the layer.
    """

    gate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__()
        self.experts = config.num_moe_experts

    def set_layer_number(self, number: int) -> None:
        pass

    def forward(self, hidden: Tensor, padding: Any = None) -> tuple[Tensor, Tensor]:
        """[T, 1, D] -> weights [T, E], and which of them count [T, E]."""
        _, scores, chosen = self.gate(hidden.flatten(0, 1))
        weights = scores.new_zeros(len(scores), self.experts).scatter(1, chosen, scores)
        return weights, torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, True)


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
