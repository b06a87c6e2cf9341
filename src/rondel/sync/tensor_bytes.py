"""How many bytes a tensor has, and where it lies among others in one piece of memory."""

from __future__ import annotations

import torch

from rondel.core.types import TensorInfo

HEAD, ALIGN = 4096, 64  # bytes: of the first words of a segment; of where a tensor may begin


def size_of(row: TensorInfo) -> int:
    n = getattr(torch, row.dtype).itemsize
    for side in row.shape:
        n *= side
    return n


def aligned(at: int) -> int:
    """The next place at which a tensor may begin."""
    return -(-at // ALIGN) * ALIGN
