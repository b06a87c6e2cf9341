"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each key channel of each head.

S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T        log a_t = -exp(A) softplus(W h_t + b)  [H, K]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.models.recurrent.convolution import CausalConv, activated
from rondel.models.recurrent.gated_delta import GatedDelta, unit_length
from rondel.models.recurrent.layout import RecurrentLayout

if TYPE_CHECKING:
    from rondel.models.recurrent.fused_kernels import FindKernels


def forward_kimi_delta(
    mixer: Any, states: RecurrentLayout, hidden: Tensor, *, kernels: FindKernels, **_: Any
) -> Tensor:
    """hidden [1, T, D] -> [1, T, D], for Kimi Linear, whose gates are of low rank, and Ling 3."""
    heads, size = mixer.num_heads, mixer.head_dim
    mixed = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], -1)[0]
    mixed = activated(mixer.activation, states.scan(mixer.layer_idx, CausalConv.of(mixer.conv1d), mixed))
    q, k, v = mixed.float().unflatten(-1, (3, heads, size)).unbind(1)
    g, beta = mixer.forget_gate(hidden)[0], mixer.b_proj(hidden)[0].sigmoid()
    rule = GatedDelta(heads, size, size, kernels(hidden, size))
    y = states.scan(mixer.layer_idx, rule, unit_length(q), unit_length(k), v, g, beta.float()).to(hidden.dtype)
    gate = mixer.g_proj(hidden) if hasattr(mixer, "g_proj") else mixer.g_b_proj(mixer.g_a_proj(hidden))
    return mixer.o_proj(mixer.o_norm(y, gate[0].view(y.shape)).flatten(1)[None])
