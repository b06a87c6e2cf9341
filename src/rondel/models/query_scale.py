"""Llama 4 scales the queries of layers without rotary positions by their place in the row; packed tokens have a
position of their own.

    q_i <- q_i * (1 + attn_scale * log(1 + floor((i + 1) / floor_scale)))      arXiv:2501.19399
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rondel.models.attention import attention_layout


def install_query_scale(model: Any) -> None:
    """Make such layers scale by the position that the pass names, whenever a layout is in force."""
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            layer.register_forward_pre_hook(_note_positions, with_kwargs=True)
            attention.forward = functools.partial(_scaled_by_position, attention, type(attention).forward)


def _note_positions(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    layer.self_attn.positions = kwargs["position_ids"]


def _scaled_by_position(module: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    if attention_layout() is None:
        return own(module, *args, **kwargs)
    module.attn_temperature_tuning = False
    try:
        return own(module, *args, query_scale=query_scale(module, module.positions), **kwargs)
    finally:
        module.attn_temperature_tuning = True


def query_scale(module: Any, positions: Tensor) -> Tensor:
    """[1,T] positions -> [1,1,T,1]."""
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0)[:, None, :, None]
