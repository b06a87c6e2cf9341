"""Noise of points and actions, counter-based as that of tokens is (generate/engine/builtin/sampler.py)."""

from __future__ import annotations

import numpy as np


def draw_normal(key: int, t: int, n: int) -> np.ndarray:
    """[n] float32: the noise of step t of a sample, from Philox(key) at a place of its own. Step 0 of a flow is the
    noise that the chain begins with. It depends on nothing else: a parked, resumed or replayed sample has the same.
    """
    generator = np.random.Generator(np.random.Philox(key=key % (1 << 128), counter=[0, 0, 0, t]))
    return generator.standard_normal(n, np.float32)
