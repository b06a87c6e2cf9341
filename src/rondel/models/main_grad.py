"""What optimizer and layers tell each other: gradients added straight into the optimizer's accumulator, and that
weights have changed.

Autograd makes a dense [V, D] gradient for the head, another for the embedding, and their sum, in every micro-batch:
three arrays of 113 MB for SmolLM2-135M, of which a micro-batch touches a few hundred rows. Here each is added where it
is summed. Megatron-LM calls the accumulator `main_grad` and this gradient accumulation fusion.

    main_grad(weight) is None     not owned by an optimizer of ours: autograd's own way
    main_grad(weight)             fp32, the shape of the weight; whoever adds to it returns no gradient of the weight
    room_of_gradient(weight)      the same, and whether nothing was added yet: whoever asks then writes all of it
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_returned = threading.local()
_masters: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> a weak reference to its master


def own_parameter(parameter: nn.Parameter, master: Tensor) -> None:
    """From now on the gradient of `parameter` may be added to `master.grad`."""
    _masters[parameter] = weakref.ref(master)


def is_owned(weight: Tensor) -> bool:
    """Whether an optimizer of ours adds the gradients of this weight up, on a CPU:
    GPUs sort them to be reproducible."""
    return weight.is_cpu and weight in _masters


@contextmanager
def returned_gradients() -> Iterator[None]:
    """Inside, on this thread, no accumulator is added to: autograd gets all gradients, as if nobody owned a weight."""
    outer, _returned.on = getattr(_returned, "on", False), True
    try:
        yield
    finally:
        _returned.on = outer


def main_grad(weight: Tensor) -> Tensor | None:
    """The fp32 accumulator of an owned weight, made when it is first asked for."""
    room, fresh = room_of_gradient(weight)
    return room.zero_() if room is not None and fresh else room


def room_of_gradient(weight: Tensor) -> tuple[Tensor | None, bool]:
    """The accumulator of an owned weight, and whether it is a room in which nothing was written yet: a product that
    writes its sums needs no zeros.
    """
    master = _masters[weight]() if is_owned(weight) and not getattr(_returned, "on", False) else None
    if master is None:
        return None, False
    if fresh := master.grad is None:
        master.grad = torch.empty_like(master)
    return master.grad, fresh


# -- by what a copy of a weight (packed, compiled) notices that the weight has changed since ----------

Stamp = tuple[int, int, int]
Stamps = tuple[list[int], list[int], int]

_changes = 0
_version_of = attrgetter("_version")


def weights_changed() -> None:
    """Whatever was made of trained weights is made again before its next use: torch counts no writes of its fused
    optimizers, and none of another process in shared memory.
    """
    global _changes
    _changes += 1


def stamp_of(tensor: Tensor) -> Stamp:
    """(storage, torch's version counter, calls of `weights_changed`, or -1 for a frozen weight,
    which no optimizer writes)"""
    return tensor.data_ptr(), tensor._version, _changes if tensor.requires_grad else -1


def stamps_of(tensors: list[Tensor]) -> Stamps:
    """Changed where a `stamp_of` one of them is: storages, counters, and calls of `weights_changed` where one is trained.
    Each of the three is one reading of all: behind a pass over weights what tensors know of themselves lies in no cache.
    """
    trained = any(tensor.requires_grad for tensor in tensors)
    return list(map(Tensor.data_ptr, tensors)), list(map(_version_of, tensors)), _changes if trained else -1
