"""A sequence in chunks, which is how a linear recurrence becomes a few matrix products.

B rows · H heads · L tokens · N chunks of C tokens
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def in_chunks(x: Tensor, size: int) -> Tensor:
    """[B, H, L, ...] -> [B, H, N, C, ...], padded with zeros."""
    missing = -x.shape[2] % size
    x = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, missing)) if missing else x
    return x.unflatten(2, (-1, size))


def chunk_decay(g: Tensor) -> tuple[Tensor, Tensor]:
    """Logs of decay [..., C] -> their sums up to each token [..., C], and the decay from token s to t [..., C, C]."""
    total = g.cumsum(-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
