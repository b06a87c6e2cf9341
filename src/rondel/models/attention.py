"""One attention, registered with transformers, for packed training, shared-prefix training and paged serving.

The module calls `rondel_attention` in every layer; what it means is the *layout* in force (`with
use_attention_layout(layout):`):

    PackedLayout   flat [T] tokens made of segments; a segment sees its ancestors whole and itself causally
    PagedLayout    flat [T] new tokens of running requests; each sees its cached context through its slots

Recurrent layers ask the same layout for `states` (models/recurrent/layout.py).

T tokens · H query heads · K key/value heads · D head size
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rondel.core.errors import ModelError
from rondel.models.dense_attention import ScoreRule

NAME = "rondel"


class AttentionLayout(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [T,H,D], k and v [T,K,D] -> [T,H,D]."""

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        """q [T,H,N+E] over latents c [T,R] and rotary keys r [T,E] (models/latent_attention.py) -> [T,H,V]."""


class LatentProjection(Protocol):
    """What makes keys and values of latents, or attends without them (models/latent_attention.py)."""

    rank: int
    value: int

    def expand(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]: ...

    def absorb_queries(self, q: Tensor) -> Tensor: ...

    def project_values(self, out: Tensor) -> Tensor: ...

    def expansion_pays(self, new: int) -> bool: ...

    def of_rows(self, first: int, count: int) -> LatentProjection: ...


_here = threading.local()


@contextmanager
def use_attention_layout(layout: AttentionLayout) -> Iterator[None]:
    """Every attention layer called inside uses `layout`."""
    outer = getattr(_here, "layout", None)
    _here.layout = layout
    try:
        yield
    finally:
        _here.layout = outer


class NotedCalls:
    """A layout that notes what it was asked to attend to: layer, rule, queries and keys."""

    def __init__(self, layout: Any) -> None:
        self._layout, self.calls = layout, list[tuple[int, ScoreRule, Tensor, Tensor]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        self.calls.append((layer, rule, q, k))
        out: Tensor = self._layout.attend(layer, q, k, v, rule)
        return out


def attention_layout() -> AttentionLayout | None:
    """The layout in force; None where the model's own attention runs."""
    return getattr(_here, "layout", None)


def current_layout() -> Any:
    """The layout in force."""
    if (layout := attention_layout()) is None:
        raise ModelError("this model is set up for packed tokens; call it inside `with use_attention_layout(layout):`")
    return layout


def rondel_attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    softcap=None,
    **kwargs,
):
    """transformers' attention signature: query [1,H,T,D] -> ([1,T,H,D], None)."""
    layout = current_layout()
    if query.shape[0] != 1:
        raise ModelError(f"batch of {query.shape[0]}: tokens are packed into one row [1, T] here, there is no padding")
    if (by_position := kwargs.get("query_scale")) is not None:
        query = (query * by_position).to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # rotated in fp32 where the residual stream is; cached and multiplied in the dtype of the products
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if (own := getattr(module, "own_key_heads", None)) is not None:  # of this tensor-parallel rank's queries
        k, v = k[:, own], v[:, own]
    layer = kwargs.get("cache_layer", module.layer_idx)  # where a module runs several times
    rule = ScoreRule(
        scale,
        sliding_window,
        softcap,
        _chunk_size(module, layer),
        kwargs.get("s_aux"),
        kwargs.get("alibi_slopes"),
        _chosen_keys(kwargs.get("indices")),
        None if _stays_causal(module, sliding_window) else kwargs.get("image_of_token"),
    )
    if (up := getattr(module, "up_projection", None)) is None:
        out = layout.attend(layer, q, k, v, rule)
    else:
        out = layout.attend_latents(layer, q, v[:, 0], k[:, 0], up, rule)
    return out.contiguous().unsqueeze(0), None


def _chunk_size(module: Any, layer: int) -> int | None:
    """transformers tells it to the mask alone."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return module.config.attention_chunk_size if kinds and kinds[layer] == "chunked_attention" else None


def _stays_causal(module: Any, window: int | None) -> bool:
    """Whether image tokens see none behind them here, where elsewhere they may: full layers of Gemma 4."""
    return window is None and getattr(getattr(module, "config", None), "use_bidirectional_attention", None) == "vision"


def _chosen_keys(indices: Tensor | None) -> Tensor | None:
    """[1,T,k] of an indexer -> [T,k]; None where all tokens see all."""
    return None if indices is None or indices.shape[2] == 0 else indices[0]


AttentionInterface.register(NAME, rondel_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # layouts know who sees whom
