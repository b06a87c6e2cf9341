"""Gradients of the vocabulary's matrices, added straight into the optimizer's accumulator.

Autograd makes a dense [V, D] gradient for the head, another for the embedding, and their sum, in every micro-batch:
three arrays of 113 MB for SmolLM2-135M, of which a micro-batch touches a few hundred rows. Here each is added where it
is summed. Megatron-LM calls the accumulator `main_grad` and this gradient accumulation fusion.

    main_grad(weight) is None     not owned by an optimizer of ours, or nothing is accumulated yet: autograd's own way
    main_grad(weight)             fp32, the shape of the weight; whoever adds to it returns no gradient of the weight
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_masters: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> a weak reference to its master


def own_parameter(parameter: nn.Parameter, master: Tensor) -> None:
    """From now on the gradient of `parameter` may be added to `master.grad`."""
    _masters[parameter] = weakref.ref(master)


def main_grad(weight: Tensor) -> Tensor | None:
    """The fp32 accumulator of a weight, on a CPU; GPUs add in any order, and sort to be reproducible."""
    master = _masters.get(weight)
    owner = master() if master is not None else None
    return owner.grad if owner is not None and weight.is_cpu else None
