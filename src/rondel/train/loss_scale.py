"""Dynamic loss scaling of float16 (arXiv:1710.03740): a gradient below 6e-8 is 0 there, and one above 65504 infinite.

    backward   of scale · loss                 every gradient is scale times as large; its fp32 sum is divided again
    finite     the step is taken; after INTERVAL of them in a row the scale doubles
    overflow   the step is not taken, the scale halves

The numbers are those of torch.amp.GradScaler. All are powers of two, so that scaling rounds nothing. Each of several
ranks keeps the scale, and decides by the norm of the summed gradient, which is the same on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
LEAST = 1.0  # what is not finite at this scale did not overflow by scaling


class LossScale:
    """`value`: the scale of the next update; `finite`: updates in a row that were finite since it last changed."""

    def __init__(self) -> None:
        self.value, self.finite = FIRST, 0

    def update(self, *, overflowed: bool) -> None:
        if overflowed:
            self.value, self.finite = max(LEAST, self.value * BACKOFF), 0
            return
        self.finite += 1
        if self.finite == INTERVAL:
            self.value, self.finite = self.value * GROWTH, 0

    @property
    def can_shrink(self) -> bool:
        """Whether a gradient that is not finite may be one that a smaller scale makes finite."""
        return self.value > LEAST

    def state(self) -> Tensor:
        return torch.tensor([self.value, self.finite], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        value, finite = state.tolist()
        self.value, self.finite = value, int(finite)


def loss_scale_of(model: nn.Module) -> LossScale | None:
    """One for a model that computes in float16, under an adapter in float32 too; None for all others."""
    return LossScale() if any(p.dtype == torch.float16 for p in model.parameters()) else None
