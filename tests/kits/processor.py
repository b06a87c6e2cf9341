"""What this processor's products do, asked by making some."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F


@cache
def rows_alike() -> bool:
    """Whether a row of a plain product has the same bits however many rows are beside it and wherever it lies: torch's
    (not oneDNN's) and numpy's. So it is with AVX-512; an EPYC with AVX2 alone takes other kernels for up to three rows.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(16, 64, generator=generator) for _ in range(2))
    whole, tile = F.linear(x, w), x.numpy() @ w.numpy().T
    few = all(torch.equal(F.linear(x[:n], w), whole[:n]) for n in (1, 2, 3))
    return few and all(np.array_equal(np.roll(x.numpy(), n, 0) @ w.numpy().T, np.roll(tile, n, 0)) for n in (1, 3))
