"""By what a copy of a weight (packed, compiled) notices that the weight has changed since."""

from __future__ import annotations

from torch import Tensor

Stamp = tuple[int, int, int]

_changes = 0


def weights_changed() -> None:
    """Whatever was made of trained weights is made again before its next use: torch counts no writes of its fused
    optimizers, and none of another process in shared memory.
    """
    global _changes
    _changes += 1


def stamp_of(tensor: Tensor) -> Stamp:
    """(storage, torch's version counter, calls of `weights_changed`, or -1 for a frozen weight, which no optimizer writes)"""
    return tensor.data_ptr(), tensor._version, _changes if tensor.requires_grad else -1
