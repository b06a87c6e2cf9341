"""Which mixers of transformers keep a state that can be packed and served, and the forward pass that each gets instead.

A mixer asks the layout in force where its state comes from, as attention does for its keys. Outside of a layout, while
the model is switched to another attention than ours, its mixers are transformers' own, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.attention import NAME, attention_layout, current_layout
from rondel.models.recurrent.convolved_qkv import forward_convolved_qkv
from rondel.models.recurrent.fused_kernels import fused_kernels
from rondel.models.recurrent.gated_delta import forward_gated_delta
from rondel.models.recurrent.kimi_delta import forward_kimi_delta
from rondel.models.recurrent.lightning_attention import forward_lightning
from rondel.models.recurrent.mamba import forward_mamba, forward_mamba_heads
from rondel.models.recurrent.mamba2 import forward_mamba2
from rondel.models.recurrent.mlstm import forward_mlstm
from rondel.models.recurrent.ngrams import forward_ngram_layer
from rondel.models.recurrent.rg_lru import forward_rg_lru
from rondel.models.recurrent.short_conv import forward_short_conv
from rondel.models.recurrent.wkv import forward_channel_mix, forward_wkv

# (mixer, RecurrentLayout, hidden [1, T, D], kernels=FindKernels, what else its layer hands it) -> as its own
Forward = Callable[..., Any]
MIXERS: dict[str, Forward] = {  # by the mixer's class
    "Lfm2ShortConv": forward_short_conv,
    "Lfm2MoeShortConv": forward_short_conv,
    "Lfm3ShortConv": forward_short_conv,
    "Qwen3NextGatedDeltaNet": forward_gated_delta,
    "Qwen3_5GatedDeltaNet": forward_gated_delta,
    "Qwen3_5MoeGatedDeltaNet": forward_gated_delta,
    "Qwen4ExpTextGatedDeltaNet": forward_gated_delta,
    "OlmoHybridGatedDeltaNet": forward_gated_delta,
    "KimiLinearDeltaAttention": forward_kimi_delta,
    "BailingHybridDeltaAttention": forward_kimi_delta,
    "MiniMaxLightningAttention": forward_lightning,
    "RecurrentGemmaRecurrentBlock": forward_rg_lru,
    "RwkvSelfAttention": forward_wkv,
    "RwkvFeedForward": forward_channel_mix,
    "Mamba2Mixer": forward_mamba2,
    "BambaMixer": forward_mamba2,
    "FalconH1Mixer": forward_mamba2,
    "GraniteMoeHybridMambaLayer": forward_mamba2,
    "NemotronHMamba2Mixer": forward_mamba2,
    "MambaMixer": forward_mamba,
    "FalconMambaMixer": forward_mamba,
    "JambaMambaMixer": forward_mamba,
    "ZambaMambaMixer": forward_mamba_heads,
    "Zamba2MambaMixer": forward_mamba2,
    "ZayaCCAProjection": forward_convolved_qkv,
    "xLSTMLayer": forward_mlstm,
    "Qwen4ExpTextPLELayer": forward_ngram_layer,
}


def install_recurrent(model: Any) -> list[int]:
    """Give every recurrent mixer its forward pass. -> the layers that have one."""
    layers, config = set(), model.config.get_text_config()
    for name, module in model.named_modules():
        if (forward := MIXERS.get(type(module).__name__)) is not None:
            if not hasattr(module, "layer_idx"):  # then its name says where it stands
                module.layer_idx = next(int(part) for part in name.split(".") if part.isdigit())
            module.forward = functools.partial(_forward_with_layout, module, config, forward)
            layers.add(module.layer_idx)
    return sorted(layers)


def _forward_with_layout(
    mixer: Any, config: Any, forward: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if config._attn_implementation != NAME and attention_layout() is None:
        return type(mixer).forward(mixer, hidden_states, *args, **kwargs)
    if hidden_states.shape[0] != 1:
        raise ModelError(f"batch of {hidden_states.shape[0]}: tokens are packed into one row [1, T], without padding")
    named = dict(zip([*inspect.signature(type(mixer).forward).parameters][2:], args))
    return forward(mixer, current_layout().states, hidden_states, kernels=fused_kernels, **named, **kwargs)


def keep_sums_in_order(model: Any) -> bool:
    """Let the states of aligned numerics have one order of sums. -> False, and nothing is changed, where a mixer has a
    recurrence, whose sums depend on how a prompt is cut into chunks.
    """
    mixers = [m for m in model.modules() if type(m).__name__ in MIXERS]
    if not mixers or any(MIXERS[type(m).__name__] is not forward_short_conv for m in mixers):
        return False
    for mixer in mixers:
        mixer.in_order = True
    return True
