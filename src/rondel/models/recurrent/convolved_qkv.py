"""Compressed convolutional attention (arXiv:2510.04476), for ZAYA: queries, keys and values that look back a few
tokens.

    [q, k]_t = grouped(depthwise([q, k]_{t-K} ... [q, k]_t)) + their mean      state: the last K tokens' [q, k]
    v_t      = [W h_t, W' h_{t-1}]                                             state: the last token's h

Attention caches what comes out, so only these windows are states.

B rows · L tokens · C channels of [q, k] · K tokens that both convolutions look back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rondel.models.recurrent.layout import RecurrentLayout
from rondel.models.recurrent.wkv import PreviousToken


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionPair:
    """Inputs one x [B, L, C], state [B, K, C]; a depthwise convolution, and one over the channels of each head."""

    depthwise: nn.Conv1d
    grouped: nn.Conv1d
    name: str = "window"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.depthwise.kernel_size[0] + self.grouped.kernel_size[0] - 2, self.depthwise.in_channels

    @property
    def state_dtype(self) -> torch.dtype:
        return self.depthwise.weight.dtype

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        seen = torch.cat([state.to(x.dtype), x], 1)  # [B, K+L, C]
        out = self.grouped(self.depthwise(seen.transpose(1, 2))).transpose(1, 2)
        if lengths is None:
            return out, seen[:, x.shape[1] :]
        last = lengths[:, None] + torch.arange(state.shape[1], device=x.device)
        return out, seen.gather(1, last[:, :, None].expand(-1, -1, seen.shape[2]))


def forward_convolved_qkv(
    mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [1, T, D] -> queries [1, T, H, d], keys and values [1, T, K, d]."""
    size, groups = mixer.head_dim, mixer.num_key_value_groups
    q, k = (side(hidden)[0] for side in (mixer.q_proj, mixer.k_proj))
    mixed = states.scan(
        mixer.layer_idx,
        ConvolutionPair(mixer.conv_qk_depthwise, mixer.conv_qk_grouped),
        torch.cat([q, k], -1),
    )
    residual = (q.unflatten(-1, (-1, size)) + k.unflatten(-1, (-1, size)).repeat_interleave(groups, 1)) * 0.5
    query, key = (x.unflatten(-1, (-1, size)) for x in mixed.split([q.shape[1], k.shape[1]], -1))
    query, key = query + residual, key + residual.unflatten(1, (-1, groups)).mean(2)
    before = states.scan(mixer.layer_idx, PreviousToken(hidden.shape[2], hidden.dtype, "previous"), hidden[0])
    value = torch.cat([mixer.v_proj_current(hidden), mixer.v_proj_delayed(before[None])], -1)[0]
    return query[None], key[None], value.unflatten(-1, (-1, size))[None]
