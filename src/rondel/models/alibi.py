"""Bloom and MPT, whose own code knows neither transformers' attention interface nor packed tokens.

Their distances stand in the scores: -slope_h * (i - j) (ALiBi, arXiv:2108.12409). Under an attention layout their
attention asks it, with the slopes; without one everything is the model's own.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from rondel.models.attention import attention_layout, rondel_attention

FAMILIES = ("bloom", "mpt")


def install_alibi(model: Any) -> None:
    """Make its attention ask the layout in force, where there is one."""
    for module in model.modules():
        kind = type(module).__name__
        if kind not in _FORWARD:
            continue
        if kind.endswith("Attention"):
            heads, device = getattr(module, "num_heads", None) or module.n_heads, next(module.parameters()).device
            module.register_buffer("slopes", alibi_slopes(heads, kind == "MptAttention", device), persistent=False)
        module.forward = functools.partial(_switched, _FORWARD[kind], type(module).forward, module)


def alibi_slopes(heads: int, interleaved: bool, device: torch.device | str = "cpu") -> Tensor:
    """[H] 2^(-8 (h + 1) / H). If H is no power of two, Bloom takes those of the power below and then every other one
    of the power above; MPT takes every other one of the power above, and then the rest.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(below)
    if below != heads:
        above = _geometric(2 * below)
        parts = [above[1::2], above[::2]] if interleaved else [slopes, above[::2]]
        slopes = torch.cat(parts)[:heads]
    return slopes.to(device)


def _geometric(heads: int) -> Tensor:
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64)).float()


def _switched(ours: Any, own: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    if attention_layout() is None:
        return own(module, *args, **kwargs)
    return ours(module, *args, **kwargs)


def _bloom_model(module: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    return _through(module, module.word_embeddings_layernorm(module.word_embeddings(input_ids)), module.h, module.ln_f)


def _mpt_model(module: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    return _through(module, module.wte(input_ids), module.blocks, module.norm_f)


def _through(module: Any, hidden: Tensor, blocks: Any, norm: Any) -> Any:
    """No mask and no table of distances: the layout knows both."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    for block in blocks:
        takes = inspect.signature(type(block).forward).parameters
        none = {name: None for name in ("alibi", "position_bias", "attention_mask") if name in takes}
        hidden = block(hidden, **none)[0]
    return BaseModelOutputWithPast(last_hidden_state=norm(hidden))


def _bloom_attention(module: Any, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    out = rondel_attention(module, q, k, v, scaling=module.inv_norm_factor, alibi_slopes=module.slopes)[0]
    return module.dense(out.flatten(2)) + residual, None


def _mpt_attention(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    out = rondel_attention(module, q, k, v, scaling=module.softmax_scale, alibi_slopes=module.slopes)[0]
    return module.out_proj(out.flatten(2)), None


_FORWARD = {
    "BloomModel": _bloom_model,
    "BloomAttention": _bloom_attention,
    "MptModel": _mpt_model,
    "MptAttention": _mpt_attention,
}
