"""Differential attention (arXiv:2410.05258), for DiffLlama: half of the heads subtract from the other half.

    y_h = (1 - l0) norm((softmax(q_h k_h) - l softmax(q_h' k_h')) [v_h, v_h'])          h' = h + H/2
    l   = exp(lq1.lk1) - exp(lq2.lk2) + l0

transformers attends twice with the same scores, once for each half of the value heads. Here both halves lie side by
side in one value of twice the size, so a layer attends once and has one cache set.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rondel.models.attention import attention_layout, rondel_attention


def install_differential(model: Any) -> None:
    """Make its attention ask the layout in force once, where there is one."""
    for module in model.modules():
        if type(module).__name__ == "DiffLlamaAttention":
            module.forward = functools.partial(_attend_once, module, type(module).forward)


def _attend_once(module: Any, own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    if attention_layout() is None:
        return own(module, hidden_states, *args, **kwargs)
    q, k, v = (
        side(hidden_states).unflatten(2, (-1, module.head_dim)).transpose(1, 2)
        for side in (module.q_proj, module.k_proj, module.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
    both = torch.cat([half.repeat(1, 2, 1, 1) for half in v.chunk(2, 1)], -1)  # [1, K, T, 2d]
    out = rondel_attention(module, q, k, both, scaling=module.scaling)[0]  # [1, T, H, 2d]
    added, taken = out.chunk(2, 2)
    out = module.groupnorm(added - _weight(module).to(q.dtype) * taken) * (1 - module.lambda_init)
    return module.o_proj(out.flatten(2)), None


def _weight(module: Any) -> Tensor:
    first, second = (
        (q * k).sum(dtype=torch.float32).exp()
        for q, k in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    return first - second + module.lambda_init
