"""`torch` and `Tensor` for formulas. torch is imported when the first of them is computed, so
rows can be read, resolved and explained without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class Tensor:
        """The name of torch.Tensor in annotations; no value is one of these."""

    class _Torch:
        """What is asked of torch, imported at the first question."""

        def __getattr__(self, name: str) -> Any:
            import torch

            found = self.__dict__[name] = getattr(torch, name)
            return found

    torch = _Torch()
