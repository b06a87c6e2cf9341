"""The layers of a model, as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# dense layers of one form: norm, q k v, rotary, attention, product, sum, norm, gated MLP, sum
LIKE_LLAMA = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def model_blocks(model: Any) -> list[nn.Module]:
    """The layers: blocks that transformers never splits over devices."""
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in blocks and module is not model]


def decoder_blocks(model: Any, decoder: Any) -> list[nn.Module]:
    """Those of its `decoder` that are in no other, in the order in which it calls them; of a family that names none,
    its longest list of layers.
    """
    own = {id(module) for module in decoder.modules()}
    found = [block for block in model_blocks(model) if id(block) in own]
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    if found := [block for block in found if id(block) not in inner]:
        return found
    lists = [list(module) for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def map_hidden(change: Callable[[Tensor], Tensor], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Of a call of a layer or a part of one, the hidden states, by place or by name, become something else."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    key = next(k for k in ("hidden_states", "x", "input") if k in kwargs)
    return args, kwargs | {key: change(kwargs[key])}
