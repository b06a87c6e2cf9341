"""The gated short convolution of LFM2 and LFM3:  y = W_out (c * conv(b * x)),  (b, c, x) = W_in h."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rondel.models.recurrent.convolution import CausalConv
from rondel.models.recurrent.layout import RecurrentLayout


def forward_short_conv(mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any) -> Tensor:
    """hidden [1, T, D] -> [1, T, D]."""
    before, after, x = mixer.in_proj(hidden)[0].chunk(3, -1)
    conv = CausalConv.of(mixer.conv, in_order=getattr(mixer, "in_order", False))
    y = states.scan(mixer.layer_idx, conv, before * x)
    return mixer.out_proj((after * y)[None])
