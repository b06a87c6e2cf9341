"""Lightning attention (arXiv:2401.04658): linear attention that fades at a fixed rate a head, a state S [H, d, d]:

    S_t = exp(-s_h) S_{t-1} + v_t k_t^T          y_t = S_t q_t          s_h > 0, a constant of the layer

It is Mamba-2's recurrence with v, k and q in the places of dt x, B and C.

T tokens · H heads of size d
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rondel.models.recurrent.layout import RecurrentLayout
from rondel.models.recurrent.mamba2 import Mamba2Scan

if TYPE_CHECKING:
    from rondel.models.recurrent.fused_kernels import FindKernels


def forward_lightning(
    mixer: Any, states: RecurrentLayout, hidden: Tensor, *, kernels: FindKernels, **_: Any
) -> tuple[Tensor, None]:
    """hidden [1, T, D] -> [1, T, D] and None, for MiniMax."""
    heads, size = mixer.num_attention_heads, mixer.head_dim
    mixed = mixer.act_fn(mixer.qkv_proj(hidden))[0].float()
    q, k, v = mixed.unflatten(-1, (heads, 3 * size)).chunk(3, -1)  # [T, H, d]
    fade = -mixer.slope_rate.float().flatten().expand(len(v), heads)
    rule = Mamba2Scan(heads, size, size, kernels(hidden, size))
    y = states.scan(mixer.layer_idx, rule, v, fade, k, q).to(hidden.dtype)
    return mixer.out_proj(mixer.output_gate(hidden).sigmoid() * mixer.norm(y.flatten(1)[None])), None
