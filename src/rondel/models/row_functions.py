"""Functions of numbers whose rows are computed beside others, now more and now fewer, and must have the same bits.

torch takes the numbers of a tensor as whole vectors and what is left behind the last one number by number, with other
roundings: exp, silu and softplus of a row then depend on how many rows there are, unless its width is a multiple.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

VECTORS = 32  # numbers that torch takes at once on a processor with AVX-512; half of it with AVX2


def by_rows(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """function(*rows), number by number, with rows padded to a multiple of VECTORS.  [..., W] each -> [..., W]"""
    width = rows[0].shape[-1]
    if width % VECTORS == 0 or rows[0].device.type != "cpu":
        return function(*rows)
    return function(*(F.pad(x, (0, -width % VECTORS)) for x in rows))[..., :width]


def row_silu(x: Tensor) -> Tensor:
    """x·sigmoid(x).  [..., W] -> [..., W]"""
    return by_rows(F.silu, x)
