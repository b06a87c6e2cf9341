"""The layers of a model, as modules."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_blocks(model: Any) -> list[nn.Module]:
    """The layers: blocks that transformers never splits over devices."""
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in blocks and module is not model]
