"""The gated delta rule (arXiv:2412.06464), a state S [Hv, K, V] a layer, in fp32:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T          y_t = S_t^T q_t / sqrt(K)

A chunk of C tokens is a few products: with G_t = g_1 + ... + g_t inside it and A_ts = beta_t k_t.k_s exp(G_t - G_s),
s < t, the values that are really written are  (I + A)^-1 (beta v - beta exp(G) k S_0).

The decay exp(g_t) is one number a head, or one for each key channel (KDA, arXiv:2510.26692): then exp(G_t - G_s) stands
inside the sum over channels, A_ts = beta_t sum_i k_ti k_si exp(G_ti - G_si), and chunks are short.

B rows · L tokens · Hk key heads, Hv value heads (Hv / Hk share a key) · K, V sizes of a key and a value
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

CHANNELWISE = 16  # tokens of a chunk whose decays are [C, C, K] numbers


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """inputs q, k [B, L, Hk, K] of unit length, v [B, L, Hv, V], g (log of decay) [B, L, Hv, 1 or K] and beta
    [B, L, Hv], all fp32.
    """

    heads: int
    key: int
    value: int
    kernels: FusedKernels | None = None  # in place of the formulas
    name: str = "delta"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.key, self.value

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Padded tokens have k = 0 and g = 0: they write nothing and nothing fades."""
        if self.kernels is not None:
            q, k, v, g, beta = inputs
            q, k = (x.repeat_interleave(self.heads // x.shape[2], 2) for x in (q, k))
            return self.kernels.delta_rule(state, q, k, v, g, beta)
        q, k, v, g, beta = (x.transpose(1, 2) for x in inputs)  # [B, H, L, ...]
        q, k = (x.repeat_interleave(self.heads // x.shape[1], 1) for x in (q, k))
        q = q * self.key**-0.5
        if v.shape[2] == 1:
            return self._step(state, q[:, :, 0], k[:, :, 0], v[:, :, 0], g[:, :, 0], beta[:, :, 0])
        return self._chunks(state, q, k, v, g, beta)

    def _step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """One token [B, H, ...] by the definition."""
        state = state * g.exp()[..., None]
        written = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
        state = state + k[..., None] * written[..., None, :]
        return (state * q[..., None]).sum(-2)[:, None], state

    def _chunks(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        length = v.shape[2]
        size = min(CHUNK if g.shape[-1] == 1 else CHANNELWISE, length)
        q, k, v, g, beta = (in_chunks(x, size) for x in (q, k, v, g, beta))  # [B, H, N, C, ...]
        total = g.cumsum(-2)
        k_beta, faded = k * beta[..., None], total.exp()
        system, seen = _faded_products([k_beta, q], k, g)  # the diagonal of the first counts as ones
        right = torch.cat([v * beta[..., None], k_beta * faded], -1)
        values, reads = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
            [self.value, self.key], -1
        )
        q, k = q * faded, k * (total[..., -1:, :] - total).exp()
        out = []
        for n in range(v.shape[2]):
            written = values[:, :, n] - reads[:, :, n] @ state
            out.append(q[:, :, n] @ state + seen[:, :, n] @ written)
            state = state * faded[:, :, n, -1, :, None] + k[:, :, n].transpose(-1, -2) @ written
        return torch.cat(out, 2)[:, :, :length].transpose(1, 2), state


def _faded_products(rows: Sequence[Tensor], k: Tensor, g: Tensor) -> list[Tensor]:
    """x [..., C, K] of `rows`, k, and logs of decay g [..., C, 1 or K] -> sum_i x_ti k_si exp(g_i from s to t)
    [..., C, C], zero for s > t.
    """
    if g.shape[-1] == 1:
        decay = chunk_decay(g[..., 0])[1]
        return [(x @ k.transpose(-1, -2)) * decay for x in rows]
    decay = chunk_decay(g.transpose(-1, -2))[1].movedim(-3, -1)  # [..., C, C, K]
    return [(x[..., :, None, :] * k[..., None, :, :] * decay).sum(-1) for x in rows]


def unit_length(x: Tensor) -> Tensor:
    """[..., K], nearly of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def forward_gated_delta(
    mixer: Any, states: RecurrentLayout, hidden: Tensor, *, kernels: FindKernels, **_: Any
) -> Tensor:
    """hidden [1, T, D] -> [1, T, D], for Qwen3-Next, Qwen3.5 and OLMo hybrid, whose projections differ."""
    mixed, gate, b, a = _project(mixer, hidden)  # [T, 2 Hk K + Hv V], [T, Hv, V], [T, Hv], [T, Hv]
    mixed = activated(mixer.activation, states.scan(mixer.layer_idx, CausalConv.of(mixer.conv1d), mixed))
    sizes = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    heads = (mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim)
    q, k, v = (x.float().unflatten(-1, (-1, d)) for x, d in zip(mixed.split(sizes, -1), heads, strict=True))
    q, k = unit_length(q), unit_length(k)
    beta = b.sigmoid() * (2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0)
    g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
    found = kernels(hidden, mixer.head_k_dim)
    rule = GatedDelta(mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim, found)
    y = states.scan(mixer.layer_idx, rule, q, k, v, g[..., None], beta.float()).to(hidden.dtype)
    norm, out = (mixer.o_norm, mixer.o_proj) if hasattr(mixer, "o_norm") else (mixer.norm, mixer.out_proj)
    return out(norm(y.flatten(0, 1), gate.flatten(0, 1)).view(1, len(y), -1))


def _project(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if hasattr(mixer, "in_proj_qkvz"):
        q, k, v, gate, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden))
        return torch.cat([q[0].flatten(1), k[0].flatten(1), v[0].flatten(1)], -1), gate[0], b[0], a[0]
    if hasattr(mixer, "in_proj_qkv"):
        parts = mixer.in_proj_qkv(hidden), mixer.in_proj_z(hidden), mixer.in_proj_b(hidden), mixer.in_proj_a(hidden)
    else:
        mixed = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], -1)
        parts = mixed, mixer.g_proj(hidden), mixer.b_proj(hidden), mixer.a_proj(hidden)
    mixed, gate, b, a = (x[0] for x in parts)
    return mixed, gate.unflatten(-1, (-1, mixer.head_v_dim)), b, a
