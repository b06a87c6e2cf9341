"""Attention that runs several times in one pass, each time with keys and values of its own.

    Zamba, Zamba 2    one block shared by several layers: the cache set is that of the layer which calls it
    HRM text          two stacks in cycles: cycle n of a stack has the n-th set of cache layers

The attention module is told by its caller where in the pass it runs; the layout in force is asked under that number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rondel.models.attention import attention_layout

SLOTS: dict[str, Callable[[Any, dict[str, Any]], int]] = {  # by class: (module, arguments of its call) -> cache layer
    "ZambaAttention": lambda module, given: given["layer_idx"],
    "Zamba2Attention": lambda module, given: given["layer_idx"],
    "HrmTextAttention": lambda module, given: module.layer_idx + given["cycle_offset"],
}


def install_cache_slots(model: Any) -> None:
    """Make such modules ask the layout under the cache layer of the call, whenever one is in force."""
    for module in model.modules():
        if (slot := SLOTS.get(type(module).__name__)) is not None:
            module.forward = functools.partial(_in_slot, module, type(module).forward, slot)


def _in_slot(module: Any, own: Any, slot: Callable[[Any, dict[str, Any]], int], *args: Any, **kwargs: Any) -> Any:
    if attention_layout() is None:
        return own(module, *args, **kwargs)
    return own(module, *args, cache_layer=slot(module, kwargs), **kwargs)
