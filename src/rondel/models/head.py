"""The two ends of a language model that have a row for each token: the input embedding, whose gradient is added where
the optimizer keeps it, and the head, from last hidden states to logits, a few rows at a time: nothing here ever sees
the logits of a whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.models.linear import PackedLinear, as_factor, equal_blocks, fp32_product, is_tracing, product
from rondel.models.main_grad import is_owned, main_grad
from rondel.models.vocabulary_part import VocabularyPart


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


def decoder_of(model: Any) -> Any:
    """The module that ends in hidden states. Llama 4 names its part for text "model", and not as `base_model` looks. A
    flow has no such part: it is the module itself.
    """
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


@dataclass(slots=True)
class LMHead:
    """`logits = softcap(scale · (h Wᵀ + b))`; the weight is the module's own parameter, so tied
    embeddings stay tied.
    """

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    stack: PackedLinear = field(default_factory=functools.partial(PackedLinear, sums=True), repr=False)
    part: VocabularyPart | None = None  # of the rows, where others have the rest
    aligned: bool = False  # a row's logits have the same bits in every batch (models/aligned_numerics.py)
    rounded: bool = False  # to the dtype of the weight before they become fp32 (models/fp32_sums.py)

    @classmethod
    def from_model(cls, model: Any) -> LMHead:
        linear, config = model.get_output_embeddings(), model.config.get_text_config()
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # granite divides
            scale = 1.0 / config.logits_scaling
        elif getattr(config, "logit_scale", None):  # cohere multiplies
            scale = config.logit_scale
        elif getattr(config, "lm_head_multiplier", None):  # and falcon_h1
            scale = config.lm_head_multiplier
        names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        caps = (getattr(config, name, None) for name in names)
        bias, softcap = getattr(linear, "bias", None), next(filter(None, caps), None)
        return cls(linear.weight, bias, scale, softcap, rounded=getattr(model, "rounded_logits", False))

    def of_copy(self, model: Any) -> LMHead:
        """The head of a copy of its model."""
        return replace(LMHead.from_model(model), aligned=self.aligned)

    def logits(self, hidden: Tensor) -> Tensor:
        """[C, D] -> [C, V] in fp32, never rounded on the way unless `rounded`; of this rank's part of the vocabulary
        where it is cut.
        """
        with equal_blocks(self.weight.dtype) if self.aligned else nullcontext():
            out = self._multiply(as_factor(hidden, self.weight))
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)

    def _multiply(self, hidden: Tensor) -> Tensor:
        if self.stack.can_pack(hidden, [self.weight], [] if self.bias is None else [self.bias]):
            return self.stack(hidden)[0].float() if self.rounded else self.stack.fp32_product(hidden)
        if self.rounded:
            return product(hidden, self.weight, self.bias).float()
        return fp32_product(hidden, self.weight, self.bias)
