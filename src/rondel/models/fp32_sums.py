"""Sums of a model that computes in 16 bits, kept in fp32: its residual stream, and its logits (models/head.py).

    embedding   fp32 from here on          norm     reads fp32, gives 16 bits       h  = embed(tokens)      fp32
    layer       h + branch: fp32           linear   reads 16 bits, gives 16 bits    h += attend(norm(h))    fp32 + 16
                bits

Rounded to bfloat16 after every layer, the stream makes most of the noise between two programs of the same weights:
a difference in one last bit becomes one in every number within a few layers. The products stay what they are.
Trainer, engine and reference run the same module, so one switch is for all of them. Only under an attention layout: the
model's own attention sees its own dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.models.attention import attention_layout
from rondel.models.blocks import decoder_blocks
from rondel.models.processor import HALVES

# model types whose layers round the stream themselves, or read it in the dtype of their weights
ROUNDING = ("bloom", "dbrx", "flex_olmo", "gemma3n_text", "nemotron")


def install_fp32_stream(model: Any, decoder: Any) -> None:
    """Keep the residual stream of `model` in fp32 from now on; `check_loaded` proves that its layers do."""
    if model.config.get_text_config().model_type in ROUNDING:
        return
    model.get_input_embeddings().register_forward_hook(_widen)
    keep_fp32_stream(model, True)
    for module in decoder.modules():
        if type(module) is nn.LayerNorm:
            setattr(module, "forward", functools.partial(_layer_norm, module))  # noqa: B010
        elif type(module).__name__.endswith("Norm"):
            module.register_forward_hook(narrow_norm)


def keep_fp32_stream(model: Any, on: bool) -> None:
    model.get_input_embeddings().fp32_stream = on


def keeps_fp32_stream(model: Any) -> bool:
    return getattr(model.get_input_embeddings(), "fp32_stream", False)


def round_sums(model: Any) -> None:
    """From now on stream and logits are rounded to the dtype of the products, as transformers and other engines do."""
    keep_fp32_stream(model, False)
    model.rounded_logits = True  # its head reads it


class StreamProbe:
    """Whether the residual stream of a pass is fp32 behind every layer: `with StreamProbe(model, decoder) as probe`."""

    def __init__(self, model: Any, decoder: Any) -> None:
        self.blocks, self.dtypes, self._hooks = decoder_blocks(model, decoder), set[torch.dtype](), list[Any]()

    def __enter__(self) -> StreamProbe:
        self._hooks = [block.register_forward_hook(self._note) for block in self.blocks]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, block: Any, args: Any, out: Any) -> None:
        self.dtypes.add((out[0] if isinstance(out, tuple) else out).dtype)

    @property
    def is_fp32(self) -> bool:
        return self.dtypes <= {torch.float32}


def _widen(embedding: Any, args: Any, out: Tensor) -> Tensor:
    return out.float() if out.dtype in HALVES and embedding.fp32_stream and attention_layout() is not None else out


def narrow_norm(norm: Any, args: Any, out: Any) -> Any:
    """What a norm makes of the stream has the dtype of what follows it: that of its weight."""
    weight = getattr(norm, "weight", None)
    if not isinstance(out, Tensor) or weight is None or weight.dtype not in HALVES or out.dtype != torch.float32:
        return out
    return out.to(weight.dtype)


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    if norm.weight is None or x.dtype == norm.weight.dtype:
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    weight, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps).to(norm.weight.dtype)
