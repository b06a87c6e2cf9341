"""Mamba-2's state space model (arXiv:2405.21060), a state S [H, P, N] a layer, in fp32:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T          y_t = S_t C_t + D x_t          A < 0 a head

A chunk of tokens is attention without softmax, its scores C_t.B_s faded by exp(sum of dt A from s to t), beside what
is read from the state before it.

B rows · L tokens · H heads of size P · G groups of heads that share B and C [N]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.recurrent.chunks import CHUNK, chunk_decay, in_chunks
from rondel.models.recurrent.convolution import CausalConv, activated
from rondel.models.recurrent.layout import RecurrentLayout

if TYPE_CHECKING:
    from rondel.models.recurrent.fused_kernels import FindKernels, FusedKernels


@dataclass(frozen=True, slots=True)
class Mamba2Scan:
    """inputs dt x [B, L, H, P], dt A [B, L, H], B and C [B, L, G, N], all fp32."""

    heads: int
    size: int
    state: int
    kernels: FusedKernels | None = None  # in place of the formulas
    name: str = "scan"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.size, self.state

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Padded tokens have dt = 0: they write nothing and nothing fades."""
        if self.kernels is not None:
            x, fade, b, c = inputs
            b, c = (i.repeat_interleave(self.heads // i.shape[2], 2) for i in (b, c))
            return self.kernels.fading_sum(state, c, b, x, fade)
        x, fade, b, c = (i.transpose(1, 2) for i in inputs)  # [B, H, L, ...]
        b, c = (i.repeat_interleave(self.heads // i.shape[1], 1) for i in (b, c))
        length = x.shape[2]
        if length == 1:
            state = state * fade.exp()[..., None] + x.transpose(-1, -2) @ b
            return (state @ c.transpose(-1, -2)).permute(0, 3, 1, 2), state
        x, fade, b, c = (in_chunks(i, min(CHUNK, length)) for i in (x, fade, b, c))  # [B, H, N, C, ...]
        total, decay = chunk_decay(fade)
        inside = ((c @ b.transpose(-1, -2)) * decay) @ x
        written = (x * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2) @ b
        read, kept = c * total.exp()[..., None], total[..., -1].exp()[..., None, None]
        out = []
        for n in range(x.shape[2]):
            out.append(inside[:, :, n] + read[:, :, n] @ state.transpose(-1, -2))
            state = state * kept[:, :, n] + written[:, :, n]
        return torch.cat(out, 2)[:, :, :length].transpose(1, 2), state


def forward_mamba2(mixer: Any, states: RecurrentLayout, hidden: Tensor, *, kernels: FindKernels, **_: Any) -> Tensor:
    """hidden [1, T, D] -> [1, T, D], for Mamba-2, Bamba, Granite hybrid, Nemotron-H, Falcon-H1 and Zamba2."""
    scaled = getattr(mixer, "ssm_in_multiplier", None)  # Falcon-H1
    projected = mixer.in_proj(hidden if scaled is None else hidden * scaled)[0]
    if scaled is not None:
        projected = projected * mixer.mup_vector[0, 0]
    heads, groups = mixer.num_heads, mixer.n_groups
    width, state = mixer.intermediate_size, mixer.ssm_state_size
    gate, mixed, dt = projected.split([width, width + 2 * groups * state, heads], -1)
    mixed = activated(mixer.activation, states.scan(mixer.layer_idx, CausalConv.of(mixer.conv1d), mixed))
    x, b, c = mixed.float().split([width, groups * state, groups * state], -1)
    x, b, c = (i.unflatten(-1, (n, -1)) for i, n in ((x, heads), (b, groups), (c, groups)))
    dt = F.softplus(dt + mixer.dt_bias).clamp(*mixer.time_step_limit).float()
    rule = Mamba2Scan(heads, x.shape[-1], state, kernels(hidden, state))
    fade = -mixer.A_log.float().exp() * dt
    y = states.scan(mixer.layer_idx, rule, x * dt[..., None], fade, b, c) + mixer.D[:, None] * x
    y = y.flatten(1)[None]
    if getattr(mixer, "mamba_rms_norm", True):
        y = mixer.norm(y, gate[None])
    else:
        y = y * F.silu(gate[None])
    return mixer.out_proj(y.to(hidden.dtype))
