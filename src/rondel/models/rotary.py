"""The rotary embedding of most families by one kernel on a CPU.

transformers writes it as a function that each family's attention calls by name:

    q_embed = (q * cos) + (rotate_half(q) * sin)        with a cosine in fp32 where the residual stream is

which is eleven operations for each of q and k, in fp32. Here the attention's forward is the same code with another
function behind that name. `rondel_attention` rounds q and k to the dtype of the values as soon as it gets them, so
where nothing but the cache stands between the two, they are rounded here.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

from torch import nn

from rondel.models.cpu_kernels import rotate_pair

NAME = "apply_rotary_pos_emb"
ROTATION = (
    "cos = cos.unsqueeze(unsqueeze_dim)",
    "sin = sin.unsqueeze(unsqueeze_dim)",
    "q_embed = (q * cos) + (rotate_half(q) * sin)",
    "k_embed = (k * cos) + (rotate_half(k) * sin)",
    "return q_embed, k_embed",
)
HALVES = (
    "x1 = x[..., : x.shape[-1] // 2]",
    "x2 = x[..., x.shape[-1] // 2 :]",
    "return torch.cat((-x2, x1), dim=-1)",
)
CALL = f"query_states, key_states = {NAME}(query_states, key_states, cos, sin)"
BETWEEN = (  # it and the attention function
    "if past_key_values is not None:",
    "key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)",
    "attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(",
    "self.config._attn_implementation, eager_attention_forward",
    ")",
)


def install_rotary(decoder: nn.Module) -> None:
    """Attention layers of `decoder` that are written like llama's rotate by the kernel from now on."""
    for module in decoder.modules():
        forward = type(module).forward
        if "forward" not in module.__dict__ and isinstance(forward, FunctionType) and _is_plain(forward):
            names = forward.__globals__ | {NAME: functools.partial(rotate_pair, forward.__globals__[NAME])}
            own = FunctionType(forward.__code__, names, NAME, forward.__defaults__, forward.__closure__)
            own.__kwdefaults__ = forward.__kwdefaults__
            setattr(module, "forward", functools.partial(own, module))  # noqa: B010


@functools.cache
def _is_plain(forward: FunctionType) -> bool:
    """Whether an attention calls the function of these lines, and only the cache before it attends."""
    if NAME not in forward.__code__.co_names:
        return False
    rotation, half = (forward.__globals__.get(name) for name in (NAME, "rotate_half"))
    lines = _lines(forward)
    if CALL not in lines or _lines(rotation)[-len(ROTATION) :] != ROTATION or _lines(half)[-len(HALVES) :] != HALVES:
        return False
    after = lines[lines.index(CALL) + 1 :]
    ends = [i for i, line in enumerate(after) if "= attention_interface(" in line]
    return bool(ends) and set(after[: ends[0]]) <= set(BETWEEN)


def _lines(function: Any) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in inspect.getsource(inspect.unwrap(function)).splitlines()]
    except (OSError, TypeError):
        return ()
    return tuple(line for line in lines if line and not line.startswith("#"))
