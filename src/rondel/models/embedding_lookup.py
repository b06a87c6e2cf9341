"""The input embedding, whose gradient is added where the optimizer keeps it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.models.linear import is_tracing
from rondel.models.main_grad import is_owned, main_grad


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
    if is_tracing() or not (torch.is_grad_enabled() and weight.requires_grad) or not is_owned(weight):
        return F.embedding(ids, weight, embedding.padding_idx)
    return EmbeddingLookup.apply(weight, ids, embedding.padding_idx)
