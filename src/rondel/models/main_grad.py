"""Gradients of the vocabulary's matrices, added straight into the optimizer's accumulator.

Autograd makes a dense [V, D] gradient for the head, another for the embedding, and their sum, in every micro-batch:
three arrays of 113 MB for SmolLM2-135M, of which a micro-batch touches a few hundred rows. Here each is added where it
is summed. Megatron-LM calls the accumulator `main_grad` and this gradient accumulation fusion.

    main_grad(weight) is None     not owned by an optimizer of ours, or nothing is accumulated yet: autograd's own way
    main_grad(weight)             fp32, the shape of the weight; whoever adds to it returns no gradient of the weight
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rondel.models.linear import product, tracing

ROWS = 8192  # rows of the vocabulary whose gradient is computed at a time: 19 MB at D = 576
_masters: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> a weak reference to its master


def own_parameter(parameter: nn.Parameter, master: Tensor) -> None:
    """From now on the gradient of `parameter` may be added to `master.grad`."""
    _masters[parameter] = weakref.ref(master)


def main_grad(weight: Tensor) -> Tensor | None:
    """The fp32 accumulator of a weight, on a CPU; GPUs add in any order, and sort to be reproducible."""
    master = _masters.get(weight)
    owner = master() if master is not None else None
    return owner.grad if owner is not None and weight.is_cpu else None


def add_product(main: Tensor, a: Tensor, b: Tensor) -> None:
    """main [V, D] += a [M, V]ᵀ @ b [M, D], a part of V at a time."""
    for first in range(0, len(main), ROWS):
        main[first : first + ROWS].add_(product(a[:, first : first + ROWS].t(), b.t()))


class EmbeddingLookup(torch.autograd.Function):
    """ids [...] -> rows [..., D] of the weight [V, D]; the gradient of rows that nobody read is never written."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, padding: int | None):
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        main = main_grad(ctx.weight)
        if main is None:
            padding = -1 if ctx.padding is None else ctx.padding
            return torch.ops.aten.embedding_dense_backward(grad, ids, len(ctx.weight), padding, False), None, None
        rows, flat = grad.reshape(-1, grad.shape[-1]), ids.reshape(-1)
        if ctx.padding is not None:
            rows, flat = rows[flat != ctx.padding], flat[flat != ctx.padding]
        main.index_add_(0, flat, rows.to(main.dtype))
        return None, None, None


def adopt_embedding(model: nn.Module) -> None:
    """The input embedding adds its gradient in place; lookups without a gradient stay torch's."""
    find: Callable[[], nn.Module] | None = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    if type(embedding) is not nn.Embedding or embedding.scale_grad_by_freq or embedding.sparse:
        return
    if embedding.max_norm is None:
        setattr(embedding, "forward", functools.partial(_look_up, embedding))  # noqa: B010


def _look_up(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    weight = embedding.weight
    if tracing() or not (torch.is_grad_enabled() and weight.requires_grad) or main_grad(weight) is None:
        return F.embedding(ids, weight, embedding.padding_idx)
    return EmbeddingLookup.apply(weight, ids, embedding.padding_idx)
