"""Mamba's selective state space model (arXiv:2312.00752), a state S [I, N] a layer, in fp32:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T          y_t = (S_t C_t + D x_t) silu(z_t)          A < 0 [I, N]

Every channel fades at N rates of its own, so there is no product for a chunk: tokens are taken one after another.

B rows · L tokens · I channels · N numbers of state a channel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.recurrent.convolution import CausalConv, activated
from rondel.models.recurrent.layout import RecurrentLayout


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """fade A [I, N]; inputs dt x and dt [B, L, I], B and C [B, L, N], all fp32."""

    fade: Tensor
    name: str = "scan"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return tuple(self.fade.shape)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Padded tokens have dt = 0: they write nothing and nothing fades."""
        x, dt, b, c = inputs
        kept = (dt[..., None] * self.fade).exp()  # [B, L, I, N]
        written = x[..., None] * b[:, :, None]
        out = []
        for keep, write, read in zip(kept.unbind(1), written.unbind(1), c.unbind(1), strict=True):
            state = keep * state + write
            out.append((state * read[:, None]).sum(-1))
        return torch.stack(out, 1), state


def forward_mamba(mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any) -> Tensor:
    """hidden [1, T, D] -> [1, T, D], for Mamba, Falcon-Mamba and Jamba; the latter two normalise dt, B and C."""
    x, gate = mixer.in_proj(hidden)[0].chunk(2, -1)
    x = activated(mixer.activation, states.scan(mixer.layer_idx, CausalConv.of(mixer.conv1d), x))
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, b, c = mixer.x_proj(x[None])[0].split(sizes, -1)
    if hasattr(mixer, "dt_layernorm"):
        dt, b, c = mixer.dt_layernorm(dt), mixer.b_layernorm(b), mixer.c_layernorm(c)
    dt = F.softplus(mixer.dt_proj(dt[None])[0]).float()
    rule = SelectiveScan(-mixer.A_log.float().exp())
    y = states.scan(mixer.layer_idx, rule, x.float() * dt, dt, b.float(), c.float())
    y = (y + x * mixer.D.float()) * F.silu(gate)
    return mixer.out_proj(y.to(hidden.dtype)[None])


def forward_mamba_heads(mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any) -> Tensor:
    """hidden [1, T, D] -> [1, T, D], for Zamba: each of M heads of I/M channels has a dt, B and C of its own."""
    x, gate = mixer.in_proj(hidden)[0].unflatten(-1, (-1, 2)).unbind(-1)
    x = activated(mixer.activation, states.scan(mixer.layer_idx, CausalConv.of(mixer.conv1d), x))
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    out = []
    for head, own in enumerate(x.chunk(mixer.n_mamba_heads, -1)):
        dt, b, c = (own @ mixer.x_proj_weight[head].T).split(sizes, -1)
        dt = F.softplus(dt @ mixer.dt_proj_weight[head].T + mixer.dt_proj_bias[head]).float()
        rule = SelectiveScan(-mixer.A_log[head].float().exp(), f"scan {head}")
        y = states.scan(mixer.layer_idx, rule, own.float() * dt, dt, b.float(), c.float())
        out.append(y + own * mixer.D[head].float())
    y = torch.cat(out, -1) * F.silu(gate)
    return mixer.out_proj(y.to(hidden.dtype)[None])
