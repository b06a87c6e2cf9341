"""The real-gated linear recurrent unit (arXiv:2402.19427), a state h [W] a layer, in fp32:

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)       log a_t = -8 r_t softplus(L)       r, i: gates of x in blocks

The first token of a sequence enters whole: its square root counts as 1.

B rows · L tokens · W channels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.recurrent.convolution import CausalConv
from rondel.models.recurrent.layout import RecurrentLayout

STEEPEST = 1000.0  # gradient of the square root, which has none at zero


@dataclass(frozen=True, slots=True)
class LinearRecurrence:
    """h_t = exp(g_t) h_{t-1} + x_t; inputs g and x [B, L, W], fp32."""

    width: int
    name: str = "recurrence"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Runs of tokens are joined to runs of twice their length, log2(L) times. Padded tokens have g = x = 0."""
        g, x = inputs
        kept, sums, reach = g.exp(), x, 1  # over the last `reach` tokens up to each
        while reach < x.shape[1]:
            sums = sums + kept * F.pad(sums, (0, 0, reach, 0))[:, :-reach]
            kept = kept * F.pad(kept, (0, 0, reach, 0))[:, :-reach]
            reach *= 2
        out = sums + g.cumsum(1).exp() * state[:, None]
        return out, out[:, -1]


def forward_rg_lru(
    mixer: Any, states: RecurrentLayout, hidden: Tensor, *, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """hidden [1, T, D] and positions [1, T] -> [1, T, D] and None, for RecurrentGemma."""
    unit, gate = mixer.rg_lru, mixer.act_fn(mixer.linear_y(hidden))
    x = states.scan(mixer.layer_idx, CausalConv.of(mixer.conv_1d), mixer.linear_x(hidden)[0])
    enter = _block_gate(x, unit.input_gate_weight, unit.input_gate_bias)
    fade = _block_gate(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    g = -8.0 * fade * F.softplus(unit.recurrent_param)
    first = (position_ids[0] == 0)[:, None]
    share = torch.where(first, 1.0, _bounded_sqrt(1 - (2 * g).exp()))
    y = states.scan(mixer.layer_idx, LinearRecurrence(x.shape[-1]), g.float(), (x * enter * share.to(x.dtype)).float())
    return mixer.linear_out(y.to(hidden.dtype)[None] * gate), None


def _block_gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, W], weight [N, W/N, W/N], bias [N, W/N] -> sigmoid of each block's product [T, W]."""
    blocks = x.unflatten(-1, bias.shape).transpose(0, 1)
    return torch.baddbmm(bias[:, None], blocks, weight).transpose(0, 1).flatten(1).sigmoid()


def _bounded_sqrt(x: Tensor) -> Tensor:
    """sqrt(x), with a gradient of at most STEEPEST."""
    fixed = x.detach()
    slope = (4 * fixed).clamp_min(STEEPEST**-2).rsqrt()
    return fixed.sqrt() + (x - fixed) * slope
