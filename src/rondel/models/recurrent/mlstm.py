"""The matrix memory of xLSTM (arXiv:2405.04517), a state C [H, V, K] and its normaliser n [H, K], in fp32:

    C_t = f_t C_{t-1} + e^{i_t} v_t k_t^T      n_t = f_t n_{t-1} + e^{i_t} k_t      f_t = sigmoid(...)
    y_t = C_t q_t / (max(|n_t q_t|, 1) + eps e^{m_t})                               m_t = max(m_{t-1} + log f_t, i_t)

It is Mamba-2's recurrence with e^i v in the place of dt x, and the normaliser is one more row of C. transformers keeps
both over e^m, so that no exponential overflows; i is capped at 15 here, which fp32 holds, and m stands beside eps
alone.

B rows · L tokens · H heads · K, V sizes of a key and a value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.recurrent.layout import RecurrentLayout
from rondel.models.recurrent.mamba2 import Mamba2Scan


@dataclass(frozen=True, slots=True)
class FadingMaximum:
    """m_t = max(m_{t-1} + g_t, i_t); inputs g and i [B, L, H], state [B, H], which begins at 0."""

    heads: int
    name: str = "maximum"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.heads,)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        total = inputs[0].cumsum(1)
        out = total + torch.maximum(state[:, None], (inputs[1] - total).cummax(1).values)
        last = out[:, -1] if lengths is None else out[torch.arange(len(out), device=out.device), lengths - 1]
        return out, last


def forward_mlstm(mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """hidden [1, T, D] -> [1, T, D] and None, for xLSTM."""
    config, heads = mixer.config, mixer.config.num_heads
    if config.weight_mode == "fused":
        sizes = [mixer.qk_dim, mixer.qk_dim, mixer.v_dim, mixer.v_dim]
        q, k, v, gate = mixer.qkv_opreact(hidden)[0].split(sizes, -1)
        write, keep = mixer.ifgate_preact(hidden)[0].chunk(2, -1)
    else:
        q, k, v, gate = (part(hidden)[0] for part in (mixer.q, mixer.k, mixer.v, mixer.ogate_preact))
        write, keep = (part(hidden)[0] for part in (mixer.igate_preact, mixer.fgate_preact))
    write, keep = (config.gate_soft_cap * torch.tanh(x / config.gate_soft_cap) for x in (write, keep))
    write, fade = write.float(), F.logsigmoid(keep.float())
    q, k, v = (x.float().unflatten(-1, (heads, -1)) for x in (q, k, v))
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1) * write.exp()[..., None]
    rule = Mamba2Scan(heads, values.shape[-1], k.shape[-1])
    read = states.scan(mixer.layer_idx, rule, values, fade, k, q * q.shape[-1] ** -0.5)
    top = states.scan(mixer.layer_idx, FadingMaximum(heads), fade, write)
    y = read[..., :-1] / (read[..., -1:].abs().clamp_min(1) + config.eps * top.exp()[..., None])
    return mixer.out_proj(gate.sigmoid()[None] * mixer.multihead_norm(y.to(hidden.dtype)[None])), None


def keep_whole_rows(model: Any) -> None:
    """transformers cuts long rows of xLSTM and carries its own states from one part to the next;
    here a row is packed."""
    if model.config.model_type == "xlstm":
        model.config.max_inference_chunksize = 1 << 62
