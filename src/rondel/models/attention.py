"""One attention, registered with transformers, for packed training, shared-prefix training and paged serving.

The module calls `rondel_attention` in every layer; what it means is the *layout* in force (`with attending(layout):`):

    PackedLayout   flat [T] tokens made of segments; a segment sees its ancestors whole and itself causally
    PagedLayout    flat [T] new tokens of running requests; each sees its cached context through its slots

T tokens · H query heads · K key/value heads · D head size · S siblings · L longest sibling · P tokens of the ancestors
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rondel.words.errors import ModelError

NAME = "rondel"


class Layout(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """q [T,H,D], k and v [T,K,D] -> [T,H,D]."""


_here = threading.local()


@contextmanager
def attending(layout: Layout) -> Iterator[None]:
    """Every attention layer called inside uses `layout`."""
    outer = getattr(_here, "layout", None)
    _here.layout = layout
    try:
        yield
    finally:
        _here.layout = outer


def rondel_attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, softcap=None, **kwargs):
    """transformers' attention signature: query [1,H,T,D] -> ([1,T,H,D], None)."""
    layout = getattr(_here, "layout", None)
    if layout is None:
        raise ModelError("this model is set up for packed tokens; call it inside `with attending(layout):`")
    if kwargs.get("s_aux") is not None:
        raise ModelError("attention sinks are not supported by the built-in attention; serve this model with vLLM or SGLang")
    if query.shape[0] != 1:
        raise ModelError(f"batch of {query.shape[0]}: tokens are packed into one row [1, T] here, there is no padding")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = layout.attend(module.layer_idx, q, k, v, scale=scale, window=sliding_window, softcap=softcap)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, rondel_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # layouts know who sees whom


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False, softcap: float | None = None) -> Tensor:
    """q [B,H,Lq,D], k and v [B,K,Lk,D]; `mask` True where a query may look. -> [B,H,Lq,D]."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    repeat = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(repeat, 1).transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v.dtype), v.repeat_interleave(repeat, 1))


# -- training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of packed tokens: `Segment(start=0, length=55, parent=None)` is a prompt, its completions name it as parent."""

    start: int
    length: int
    parent: int | None = None


class PackedLayout:
    """Who sees whom in a packed row: each segment sees its ancestors whole and itself causally.

        tokens   | prompt P | c1 ... | c2 .. | c3 ....... | next prompt ...
        keys     |<- once ->|  G siblings, one SDPA call: [own padded to L] after the shared P

    Padding exists only inside the call: padded queries are thrown away, padded keys lie after every real query.
    """

    def __init__(self, segments: list[Segment], device: torch.device | str = "cpu") -> None:
        families: dict[int | None, list[int]] = {}
        for index, segment in enumerate(segments):
            families.setdefault(segment.parent, []).append(index)
        self.families = [Family(segments, self._ancestors(segments, parent), children, device) for parent, children in families.items()]
        order = torch.cat([family.rows for family in self.families])
        self.inverse = torch.empty_like(order)
        self.inverse[order] = torch.arange(len(order), device=order.device)

    @staticmethod
    def _ancestors(segments: list[Segment], parent: int | None) -> list[Segment]:
        chain: list[Segment] = []
        while parent is not None:
            chain.insert(0, segments[parent])
            parent = segments[parent].parent
        return chain

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        parts = [family.attend(q, k, v, scale=scale, window=window, softcap=softcap) for family in self.families]
        return torch.cat(parts).index_select(0, self.inverse)


class Family:
    """Siblings with the same ancestors: S segments padded to L, after P shared tokens."""

    def __init__(self, segments: list[Segment], ancestors: list[Segment], children: list[int], device: torch.device | str) -> None:
        lengths = [segments[c].length for c in children]
        self.siblings, self.longest = len(children), max(lengths)
        pad = torch.arange(self.longest)
        grid = torch.stack([segments[c].start + pad.clamp(max=segments[c].length - 1) for c in children])  # [S, L]
        real = pad < torch.tensor(lengths)[:, None]
        self.grid, self.rows = grid.flatten().to(device), grid[real].to(device)
        self.real = real.flatten().nonzero()[:, 0].to(device) if not bool(real.all()) else None
        above = [torch.arange(a.start, a.start + a.length) for a in ancestors]
        self.above = torch.cat(above).to(device) if above else None
        self.device = device
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """[L, P+L]: True where query i, at position P+i, may look."""
        if window not in self._masks:
            shared = 0 if self.above is None else len(self.above)
            distance = torch.arange(shared, shared + self.longest, device=self.device)[:, None] - torch.arange(
                shared + self.longest, device=self.device
            )
            seen = distance >= 0
            self._masks[window] = seen if window is None else seen & (distance < window)
        return self._masks[window]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        def own(x: Tensor) -> Tensor:  # [T,H,D] -> [S,H,L,D]
            return x.index_select(0, self.grid).view(self.siblings, self.longest, *x.shape[1:]).transpose(1, 2)

        def shared(x: Tensor) -> Tensor:  # [T,K,D] -> [S,K,P,D], one copy expanded
            return x.index_select(0, self.above).transpose(0, 1).expand(self.siblings, -1, -1, -1)

        keys, values = own(k), own(v)
        causal = self.above is None and (window is None or window >= self.longest)
        if self.above is not None:
            keys, values = torch.cat([shared(k), keys], 2), torch.cat([shared(v), values], 2)
        out = sdpa(own(q), keys, values, scale=scale, mask=None if causal else self.mask(window), causal=causal, softcap=softcap)
        out = out.transpose(1, 2).reshape(self.siblings * self.longest, *q.shape[1:])
        return out if self.real is None else out.index_select(0, self.real)


# -- serving -------------------------------------------------------------------------------------


class Pools(Protocol):
    def at(self, layer: int, like: Tensor) -> Tensor:
        """The layer's pool [pages, K, D]."""


@dataclass(slots=True)
class Chunk:
    """New tokens [start, start+length) of the step that belong to one request, and the slots of its whole context."""

    start: int
    length: int
    context: Tensor  # [C] slots, the new tokens' own at the end


class PagedLayout:
    """One engine step: prefill chunks first, then one token for each decoding request.

    write   [T]    slot of every new token
    table   [B,C]  slots of the context of each decoding request, padded with slot 0
    lengths [B]    their context lengths, the new token included
    """

    def __init__(self, keys: Pools, values: Pools, write: Tensor, chunks: list[Chunk], table: Tensor | None, lengths: Tensor | None) -> None:
        self.keys, self.values, self.write, self.chunks = keys, values, write, chunks
        self.table = None if table is None else table.flatten()
        self.lengths = lengths
        if table is not None:
            self.shape = table.shape
            self.distance = lengths[:, None] - 1 - torch.arange(table.shape[1], device=table.device)  # [B,C], < 0 is padding
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        keys, values = self.keys.at(layer, k), self.values.at(layer, v)
        keys.index_copy_(0, self.write, k)
        values.index_copy_(0, self.write, v)
        parts = [self._prefill(chunk, q, keys, values, scale, window, softcap) for chunk in self.chunks]
        if self.table is not None:
            parts.append(self._decode(q[len(q) - self.shape[0] :], keys, values, scale, window, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill(self, chunk: Chunk, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        new, context = chunk.length, len(chunk.context)
        k, v = (pool.index_select(0, chunk.context).transpose(0, 1).unsqueeze(0) for pool in (keys, values))
        mine = q[chunk.start : chunk.start + new].transpose(0, 1).unsqueeze(0)
        causal = new == context and (window is None or window >= context)
        mask = None
        if not causal:
            distance = torch.arange(context - new, context, device=q.device)[:, None] - torch.arange(context, device=q.device)
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return sdpa(mine, k, v, scale=scale, mask=mask, causal=causal, softcap=softcap)[0].transpose(0, 1)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        (batch, context), heads = self.shape, keys.shape[1]
        k, v = (pool.index_select(0, self.table).view(batch, context, *pool.shape[1:]).transpose(1, 2) for pool in (keys, values))
        folded = q.reshape(batch, heads, -1, q.shape[-1])  # the query heads of one key head become its queries: no copy of the keys
        return sdpa(folded, k, v, scale=scale, mask=self._decode_mask(window), softcap=softcap).reshape(q.shape)

    def _decode_mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            seen = self.distance >= 0
            self._masks[window] = (seen if window is None else seen & (self.distance < window))[:, None, None, :]
        return self._masks[window]
