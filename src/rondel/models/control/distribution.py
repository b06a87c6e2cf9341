"""Distributions of actions: one of several, or numbers. Temperature 1 is the model's own.

M steps · A actions, or numbers of an action · temperature [M] or a number
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


def categorical(logits: Tensor, action: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """(log p(action), entropy) of softmax(logits / temperature).  [M, A], [M] -> [M], [M]"""
    heat = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    logprobs = torch.log_softmax(logits / heat, -1)
    return logprobs.gather(-1, action[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def gaussian(mean: Tensor, log_std: Tensor, action: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """(log N(action; mean, (temperature·exp(log_std))²), entropy), added up over the A numbers.
    [M, A], [A], [M, A] -> [M], [M]
    """
    heat = temperature if isinstance(temperature, Tensor) else torch.full_like(mean[:, 0], temperature)
    log_std_MA = log_std + heat.log()[:, None]
    z = (action - mean) * (-log_std_MA).exp()
    density = -(0.5 * z * z + log_std_MA + 0.5 * LOG_2PI).sum(-1)
    return density, (log_std_MA + 0.5 * (LOG_2PI + 1)).sum(-1)
