"""Functions of single numbers that give a number the same bits wherever it lies in a tensor, and whatever is beside it.

On a CPU torch computes whole vectors by one program and what is left of a tensor, or of a thread's share of it, by
another, whose last bit may differ: with AVX-512 the last numbers of a tensor whose size is no multiple of 32. Here the
tensor is filled up first, so that every number belongs to a whole vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS

VECTORS = 64  # numbers: two vectors of bfloat16 with AVX-512, the most that torch computes at once
SHARE = 1 << 15  # numbers from which on torch divides a tensor among its threads (at::internal::GRAIN_SIZE)


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a function of single numbers, differentiable. Any shape; nothing is copied where it is contiguous
    and its size fits.
    """
    if x.device.type != "cpu" or not x.numel() or torch.compiler.is_compiling():
        return function(x)
    x = x.contiguous()
    spare = -x.numel() % (VECTORS * min(torch.get_num_threads(), -(-x.numel() // SHARE)))
    if not spare:
        return function(x)
    return function(F.pad(x.flatten(), (0, spare)))[: x.numel()].view(x.shape)


def silu(x: Tensor) -> Tensor:
    """x σ(x)"""
    return in_whole_vectors(F.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """σ(x) = 1 / (1 + exp(-x))"""
    return in_whole_vectors(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))"""
    return in_whole_vectors(F.softplus, x)


def fill_activations(model: nn.Module) -> None:
    """The activations that a model of transformers has as modules compute whole vectors from now on."""
    kinds = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()} - {nn.PReLU}  # of a channel
    for module in model.modules():
        if type(module) in kinds and not isinstance(module.forward, functools.partial):
            setattr(module, "forward", functools.partial(in_whole_vectors, module.forward))  # noqa: B010
