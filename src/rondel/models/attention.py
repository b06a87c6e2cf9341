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


def rondel_attention(
    module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, softcap=None, **kwargs
):
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


DENSE = 1 << 24  # largest number of scores that are written out at once


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    train: bool = False,
) -> Tensor:
    """q [B,H,Lq,D], k and v [B,K,Lk,D]; `mask` True where a query may look; `train` for packed training. -> [B,H,Lq,D]."""
    small = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= DENSE
    if softcap is not None or (train and q.device.type == "cpu" and small):
        if causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return _dense(q, k, v, scale, mask, softcap)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, softcap: float | None) -> Tensor:
    """The scores written out. Training on a CPU takes it: torch's fused backward pass is 8 times slower there in bf16 (docs/LOG.md)."""
    batch, heads, length, size = q.shape
    folded = q.reshape(batch, k.shape[1], -1, size)  # the query heads of one key head become its queries: no copy of the keys
    scores = torch.matmul(folded, k.transpose(-1, -2)).float().view(batch, heads, length, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).to(v.dtype).view(batch, k.shape[1], -1, k.shape[2])
    return torch.matmul(weights, v).view(batch, heads, length, v.shape[-1])


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

    Siblings are families. Tokens are spread into all families' padded grids at once and collected at once; padding exists
    only in between: padded queries are thrown away, padded keys lie after every real query.
    """

    def __init__(self, segments: list[Segment], device: torch.device | str = "cpu") -> None:
        families: dict[int | None, list[int]] = {}
        for index, segment in enumerate(segments):
            families.setdefault(segment.parent, []).append(index)
        self.families: list[Family] = []
        home: dict[int, tuple[int, int]] = {}  # segment -> (family, row in it)
        for parent, children in families.items():
            for together in _calls(segments, parent, children):
                for row, child in enumerate(together):
                    home[child] = len(self.families), row
                self.families.append(Family([segments[c] for c in together], self._ancestors(segments, home, parent), device))
        grid = torch.cat([f.grid for f in self.families])
        real = torch.cat([f.real for f in self.families])
        self.sizes = [len(f.grid) for f in self.families]
        place = torch.empty(int(real.sum()), dtype=torch.int64)
        place[grid[real]] = real.nonzero()[:, 0]
        self.grid, self.place = grid.to(device), place.to(device)
        self.pads = None if bool(real.all()) else (~real).nonzero()[:, 0].to(device)

    @staticmethod
    def _ancestors(segments: list[Segment], home: dict[int, tuple[int, int]], parent: int | None) -> list[tuple[int, int, int]]:
        """[(family, row, length)] from the root down."""
        chain: list[tuple[int, int, int]] = []
        while parent is not None:
            chain.insert(0, (*home[parent], segments[parent].length))
            parent = segments[parent].parent
        return chain

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        queries, keys, values = (
            [piece.view(f.siblings, f.longest, *x.shape[1:]).transpose(1, 2) for f, piece in zip(self.families, self._spread(x))]
            for x in (q, k, v)
        )
        parts = []
        for family, mine, own_k, own_v in zip(self.families, queries, keys, values):
            out = family.attend(
                mine, family.context(own_k, keys), family.context(own_v, values), scale=scale, window=window, softcap=softcap
            )
            parts.append(out.transpose(1, 2).flatten(0, 1))  # [S*L,H,Dv]
        return _Collect.apply(torch.cat(parts), self.grid, self.place, self.pads)

    def _spread(self, x: Tensor) -> tuple[Tensor, ...]:
        return _Spread.apply(x, self.grid, self.place, self.pads).split(self.sizes)


class _Spread(torch.autograd.Function):
    """[T, ...] -> padded grid. The backward pass is a gather too, because every token stands in exactly one real place."""

    @staticmethod
    def forward(ctx, x, grid, place, pads):
        ctx.save_for_backward(place)
        return x.index_select(0, grid)

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None, None


class _Collect(torch.autograd.Function):
    """The adjoint of _Spread: padded grid -> [T, ...]."""

    @staticmethod
    def forward(ctx, x, grid, place, pads):
        ctx.save_for_backward(grid)
        ctx.pads = pads
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        (grid,) = ctx.saved_tensors
        out = grad.index_select(0, grid)
        if ctx.pads is not None:
            out.index_fill_(0, ctx.pads, 0)
        return out, None, None, None


def _calls(segments: list[Segment], parent: int | None, children: list[int]) -> list[list[int]]:
    """Which siblings go into one SDPA call: those of similar length, so that little is padded."""
    ordered = sorted(children, key=lambda c: -segments[c].length)
    calls: list[list[int]] = []
    for child in ordered:
        if calls and segments[child].length >= 0.5 * segments[calls[-1][0]].length:
            calls[-1].append(child)
        else:
            calls.append([child])
    return calls


class Family:
    """One SDPA call: S siblings padded to L, after the P tokens of their ancestors."""

    def __init__(self, segments: list[Segment], ancestors: list[tuple[int, int, int]], device: torch.device | str) -> None:
        lengths = [s.length for s in segments]
        self.siblings, self.longest, self.ancestors, self.device = len(segments), max(lengths), ancestors, device
        pad = torch.arange(self.longest)
        self.grid = torch.stack([s.start + pad.clamp(max=s.length - 1) for s in segments]).flatten()  # [S*L]
        self.real = (pad < torch.tensor(lengths)[:, None]).flatten()
        self._masks: dict[int | None, Tensor] = {}

    def context(self, own: Tensor, families: list[Tensor]) -> Tensor:
        """Keys or values [S,K,P+L,D]: the ancestors' once, expanded, then the siblings' own."""
        if not self.ancestors:
            return own
        above = [families[f][row, :, :length].expand(self.siblings, -1, -1, -1) for f, row, length in self.ancestors]
        return torch.cat([*above, own], 2)

    def mask(self, window: int | None) -> Tensor:
        """[L, P+L]: True where query i, at position P+i, may look."""
        if window not in self._masks:
            shared = sum(length for _, _, length in self.ancestors)
            at = torch.arange(shared + self.longest, device=self.device)
            distance = at[shared:, None] - at
            seen = distance >= 0
            self._masks[window] = seen if window is None else seen & (distance < window)
        return self._masks[window]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        causal = not self.ancestors and (window is None or window >= self.longest)
        return sdpa(q, k, v, scale=scale, mask=None if causal else self.mask(window), causal=causal, softcap=softcap, train=True)


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

    def __init__(
        self, keys: Pools, values: Pools, write: Tensor, chunks: list[Chunk], table: Tensor | None, lengths: Tensor | None
    ) -> None:
        self.keys, self.values, self.write, self.chunks = keys, values, write, chunks
        self.table = None if table is None else table.flatten()
        self.lengths = lengths
        if table is not None and lengths is not None:
            self.shape = table.shape
            self.distance = lengths[:, None] - 1 - torch.arange(table.shape[1], device=table.device)  # [B,C], < 0 is padding
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        keys, values = self.keys.at(layer, k), self.values.at(layer, v)
        keys.index_copy_(0, self.write, k)
        values.index_copy_(0, self.write, v)
        parts = [self._prefill(chunk, q, keys, values, scale, window, softcap) for chunk in self.chunks]
        if self.table is not None:
            k, v = keys.index_select(0, self.table), values.index_select(0, self.table)
            parts.append(self._decode(q[len(q) - self.shape[0] :], k, v, scale, window, softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill(
        self, chunk: Chunk, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
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
        """q [B,H,D]; keys and values [B*C,K,D], gathered."""
        (batch, context), heads = self.shape, keys.shape[1]
        k, v = (x.view(batch, context, *x.shape[1:]).transpose(1, 2) for x in (keys, values))
        folded = q.reshape(batch, heads, -1, q.shape[-1])  # the query heads of one key head become its queries: no copy of the keys
        return sdpa(folded, k, v, scale=scale, mask=self._decode_mask(window), softcap=softcap).flatten(1, 2)

    def _decode_mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            seen = self.distance >= 0
            self._masks[window] = (seen if window is None else seen & (self.distance < window))[:, None, None, :]
        return self._masks[window]
