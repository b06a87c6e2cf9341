"""A denoising step of a flow as a Gaussian: its coefficients, its log-density, its entropy.

    x_sigma = (1 - sigma)·x0 + sigma·noise      v = noise - x0        sigma from 1, noise alone, down to 0, a data point

    s = eta·sqrt(sigma / (1 - sigma))           dt = sigma' - sigma < 0
    x' = x·(1 + s²·dt / 2·sigma) + v·(1 + s²·(1 - sigma) / 2·sigma)·dt + s·sqrt(-dt)·noise

This is the Euler step of the stochastic equation with the marginals of dx = v·dt: the score that it needs is
-(x + (1 - sigma)·v) / sigma.  eta = 0 is the flow itself.  arXiv:2505.05470 (Flow-GRPO), eq. 9; also
arXiv:2505.07818 (DanceGRPO).  At sigma = 1, where s is infinite, the second level of the chain stands in its place.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


def noise_levels(steps: int) -> np.ndarray:
    """[K + 1] evenly from 1 to 0, in float64."""
    return np.linspace(1.0, 0.0, steps + 1)


def step_coefficients(steps: int, eta: float) -> np.ndarray:
    """[K, 4] sigma, scale_x, scale_v and std of each of K steps: x' ~ N(scale_x·x + scale_v·v, std²)."""
    levels = noise_levels(steps)
    sigma, dt = levels[:-1], np.diff(levels)
    inner = np.where(sigma < 1, sigma, levels[1] if steps > 1 else 0.5)  # where s would be infinite
    squared = eta**2 * sigma / (1 - inner)
    scale_x = 1 + squared * dt / (2 * sigma)
    scale_v = (1 + squared * (1 - sigma) / (2 * sigma)) * dt
    return np.stack([sigma, scale_x, scale_v, np.sqrt(squared * -dt)], 1)


def step_mean(x: Tensor, velocity: Tensor, coefficients: Tensor) -> Tensor:
    """[M, D], [M, D], [M, 3] -> [M, D]  scale_x·x + scale_v·v"""
    return coefficients[:, :1] * x + coefficients[:, 1:2] * velocity


def log_density(drawn: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(drawn; mean, std²), averaged over the D dimensions.  [M, D], [M, D], [M] -> [M]; at least float32, for in
    16 bits the square of a deviation in units of std overflows.

    The average and not the sum: a ratio of two of them is then of one scale, however many pixels there are
    (arXiv:2505.05470).
    """
    z = (drawn - mean) / std[:, None]
    return density_of((z * z).mean(-1), std)


def density_of(mean_square: Tensor, std: Tensor) -> Tensor:
    """The same of the mean over the D dimensions of the squared deviation in units of std.  [M], [M] -> [M]"""
    return -0.5 * mean_square - std.log() - 0.5 * LOG_2PI


def gaussian_kl(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """KL(N(mean, std²) || N(other, std²)), averaged over the D dimensions: mean of (mean - other)² / (2·std²).
    [M, D], [M, D], [M] -> [M].  arXiv:2505.05470 (Flow-GRPO), whose two policies have the noise in common.
    """
    z = (mean - other) / std[:, None]
    return 0.5 * (z * z).mean(-1)


def entropy(std: Tensor) -> Tensor:
    """Differential entropy of such a Gaussian, a dimension.  [M] -> [M]  The weights do not move it."""
    return std.log() + 0.5 * (LOG_2PI + 1)


def sinusoidal(sigma: Tensor, n: int) -> Tensor:
    """[M] -> [M, 2·n] sines and cosines of the noise level at n frequencies, pi to 2^(n/2)·pi."""
    angles = sigma[:, None] * (math.pi * 2.0 ** (torch.arange(n, device=sigma.device, dtype=sigma.dtype) / 2))
    return torch.cat([angles.sin(), angles.cos()], 1)
