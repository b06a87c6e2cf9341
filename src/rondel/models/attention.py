"""One attention, registered with transformers, for packed training, shared-prefix training and paged serving.

The module calls `rondel_attention` in every layer; what it means is the *layout* in force (`with use_attention_layout(layout):`):

    PackedLayout   flat [T] tokens made of segments; a segment sees its ancestors whole and itself causally
    PagedLayout    flat [T] new tokens of running requests; each sees its cached context through its slots

Recurrent layers ask the same layout for `states` (models/recurrent/layout.py).

T tokens · H query heads · K key/value heads · D head size · S segments of one call ·
L the longest · P most tokens above one
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rondel.core.errors import ModelError
from rondel.models.key_choice import ALL, IndexedTokens, choose_in_pack, choose_over_pages, is_chosen
from rondel.models.processor import is_widened
from rondel.models.recurrent.layout import SegmentStates, SlotStates
from rondel.models.score_rule import ScoreRule
from rondel.models.torch_library import LIBRARY

NAME = "rondel"


class AttentionLayout(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [T,H,D], k and v [T,K,D] -> [T,H,D]."""


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
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = kwargs.get("cache_layer", module.layer_idx)  # where a module runs several times
    rule = ScoreRule(
        scale,
        sliding_window,
        softcap,
        _chunk_size(module, layer),
        kwargs.get("s_aux"),
        kwargs.get("alibi_slopes"),
        _chosen_keys(kwargs.get("indices")),
    )
    out = layout.attend(layer, q, k, v, rule)
    return out.contiguous().unsqueeze(0), None


def _chunk_size(module: Any, layer: int) -> int | None:
    """transformers tells it to the mask alone."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return module.config.attention_chunk_size if kinds and kinds[layer] == "chunked_attention" else None


def _chosen_keys(indices: Tensor | None) -> Tensor | None:
    """[1,T,k] of an indexer -> [T,k]; None where all tokens see all."""
    return None if indices is None or indices.shape[2] == 0 else indices[0]


def _attend_now(q: Tensor, k: Tensor, v: Tensor, layer: int, *rule: Any) -> Tensor:
    return _here.layout.attend(layer, q, k, v, ScoreRule(*rule)).contiguous()


class _Outside:
    """While a graph is traced, attention is one operation, which asks the layout in force when the graph runs."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return torch.ops.rondel.attend(
            q, k, v, layer, rule.scale, rule.window, rule.softcap, rule.chunk, rule.sinks, rule.slopes
        )


def outside_graph() -> AbstractContextManager[None]:
    return use_attention_layout(_Outside())


LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, int layer, float scale, int? window, float? softcap, int? chunk, "
    "Tensor? sinks, Tensor? slopes) -> Tensor"
)
LIBRARY.impl("attend", _attend_now, "CPU")
torch.library.register_fake("rondel::attend", lambda q, k, v, *how: q.new_empty(*q.shape[:2], v.shape[2]), lib=LIBRARY)

AttentionInterface.register(NAME, rondel_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # layouts know who sees whom


DENSE = 1 << 24  # largest number of scores that are written out at once
LONG = 1 << 22  # pairs of a query and a key (of a head, where each has its own) in one mask of packed training


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    *,
    mask: Tensor | None = None,
    distance: Tensor | None = None,
    train: bool = False,
) -> Tensor:
    """q [B,H,Lq,D], k and v [B,K,Lk,D]; `mask` True where a query may look, None for all before it; `distance` from
    a query to a key, which slopes need, both [B or 1, 1, Lq, Lk]; `train` for packed training. -> [B,H,Lq,D].
    """
    small = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= DENSE
    dense, causal = rule.softcap is not None or (train and q.device.type == "cpu" and small), mask is None
    if mask is None and (dense or rule.sinks is not None or rule.slopes is not None):
        mask, causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(), False
    if dense:
        return _dense_attention(q, k, v, rule, mask, distance)
    dtype = q.dtype
    if q.device.type == "cpu" and is_widened(dtype):
        q, k, v = q.float(), k.float(), v.float()
    if mask is not None and rule.slopes is not None:
        mask = (
            rule.with_slopes(torch.zeros((), device=q.device), distance, 1, -1, 1, 1)
            .to(q.dtype)
            .masked_fill(~mask, float("-inf"))
        )
    if mask is not None and rule.sinks is not None:
        q, k, v, mask = _with_sink_key(q, k, v, rule, mask)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(dtype)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sinks for kernels that know none: a first key whose score is the sink and whose value is zero.

    q' = [q, sink_h / scale, 0 ...]   k' = [k, 0 ...]   k'_sink = [0, 1, 0 ...]   v_sink = 0

    Eight columns more, because kernels want sizes that are multiples of eight.
    """
    assert rule.sinks is not None
    sink = (rule.sinks / rule.scale).to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + 8)
    key[..., k.shape[3]] = 1
    q, k = torch.cat([q, F.pad(sink, (0, 7))], -1), torch.cat([key, F.pad(k, (0, 8))], 2)
    return q, k, F.pad(v, (0, 0, 1, 0)), F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, mask: Tensor | None, distance: Tensor | None
) -> Tensor:
    """The scores written out. Training on a CPU takes it: torch's fused backward pass is 8
    times slower there in bf16 (docs/LOG.md).
    """
    if is_widened(dtype := q.dtype):
        q, k, v = q.float(), k.float(), v.float()
    batch, heads, length, size = q.shape
    # the query heads of one key head become its queries: no copy of the keys
    folded = q.reshape(batch, k.shape[1], -1, size)
    scores = torch.matmul(folded, k.transpose(-1, -2)).float().view(batch, heads, length, -1) * rule.scale
    scores = rule.with_slopes(rule.capped(scores), distance, 1, -1, 1, 1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = rule.softmax(scores, 1, -1, 1, 1).to(v.dtype).reshape(batch, k.shape[1], -1, k.shape[2])
    return torch.matmul(weights, v).view(batch, heads, length, v.shape[-1]).to(dtype)


# -- training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A run of packed tokens: `PackedSegment(start=0, length=55, parent=None)` is a prompt,
    its completions name it as parent.
    """

    start: int
    length: int
    parent: int | None = None


class PackedLayout:
    """Who sees whom in a packed row: each segment sees its ancestors whole and itself causally.

        tokens   | prompt P | c1 ... | c2 .. | c3 ....... | next prompt ...
        keys     |<- once ->|  one call for segments of similar size: [those above, padded to P][own, padded to L]

    Tokens are gathered into all calls' padded grids at once, head by head, and
    collected at once. Padding exists only in between: padded queries are thrown away, padded keys are masked.
    """

    def __init__(self, segments: list[PackedSegment], device: torch.device | str = "cpu") -> None:
        self.total, self.device = sum(s.length for s in segments), device
        above: list[np.ndarray] = []  # of each segment: the places of its ancestors' tokens, from the root down
        for segment in segments:
            up = segment.parent
            above.append(
                np.empty(0, np.int64) if up is None else np.concatenate([above[up], _segment_positions(segments[up])])
            )
        self.segments, self._above = segments, above
        self.calls = [
            AttentionCall([segments[i] for i in row], [above[i] for i in row], device)
            for row in _group_segments(segments, above)
        ]
        self._made: dict[tuple[str, int], _Rows] = {}  # by what and the number of heads

    @cached_property
    def states(self) -> SegmentStates:
        """States of recurrent layers: a segment continues its parent."""
        return SegmentStates(self.segments, self.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        heads, shared, size = q.shape[1], k.shape[1], v.shape[2]
        queries, keys, values = self._query_rows(heads)(q), self._context_rows(shared)(k), self._context_rows(shared)(v)
        parts, a, b = [], 0, 0
        for call in self.calls:
            rows, width = call.queries.shape
            held = call.keys.shape[1]
            q_end, k_end = a + rows * heads * width, b + rows * shared * held
            out = call.attend(
                queries[a:q_end].view(rows, heads, width, -1),
                keys[b:k_end].view(rows, shared, held, -1),
                values[b:k_end].view(rows, shared, held, -1),
                rule,
            )
            parts.append(out.reshape(-1, size))
            a, b = q_end, k_end
        return self._collect_rows(heads)(torch.cat(parts)).view(-1, heads, size)

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> Tensor:
        """Positions [T,k] of the keys that an indexer chooses."""
        return choose_in_pack(self.calls, tokens)

    @property
    def segment_contexts(self) -> list[tuple[PackedSegment, Tensor]]:
        """Each segment with the places of its ancestors' tokens and its own."""
        return [
            (s, torch.from_numpy(np.concatenate([over, _segment_positions(s)])))
            for s, over in zip(self.segments, self._above)
        ]

    def _query_rows(self, heads: int) -> _Rows:
        """Tokens to the calls' queries: rows of [T*heads, D]."""
        return self._cached_rows("queries", heads, lambda: self._rows_of("queries", "real", heads))

    def _context_rows(self, heads: int) -> _Rows:
        """Tokens to the calls' keys."""
        return self._cached_rows("keys", heads, lambda: self._rows_of("keys", "used", heads))

    def _collect_rows(self, heads: int) -> _Rows:
        """The calls' queries back to tokens."""

        def build_rows() -> _Rows:
            spread = self._query_rows(heads)
            place = torch.empty(self.total * heads, dtype=torch.int64)
            place[spread.taken] = spread.users
            return _Rows(place, torch.ones(len(place), dtype=torch.bool), spread.length, self.device)

        return self._cached_rows("back", heads, build_rows)

    def _rows_of(self, places: str, real: str, heads: int) -> _Rows:
        index, counts = (
            torch.cat([_by_head(getattr(call, name), heads) for call in self.calls]) for name in (places, real)
        )
        return _Rows(index, counts >= 0, self.total * heads, self.device)

    def _cached_rows(self, what: str, heads: int, make: Callable[[], _Rows]) -> _Rows:
        if (what, heads) not in self._made:
            self._made[what, heads] = make()
        return self._made[what, heads]


def _segment_positions(segment: PackedSegment) -> np.ndarray:
    return np.arange(segment.start, segment.start + segment.length)


def _by_head(places: Tensor, heads: int) -> Tensor:
    """[S,N] places of tokens, -1 for none -> [S*heads*N] rows of [T*heads, D]."""
    rows = places[:, None, :] * heads + torch.arange(heads)[:, None]
    return torch.where(places[:, None, :] < 0, -1, rows).flatten()


class _Rows:
    """`rows(x)` selects rows of x [T,H,D]; its backward pass is made of gathers too,
    because who uses a row is known before.

    A row that several siblings use sums their gradients in a fixed order, so the result is the same on every run.
    """

    def __init__(self, index: Tensor, counts: Tensor, total: int, device: torch.device | str) -> None:
        """`index` [N] the rows taken, `counts` [N] False where the taken row is only padding."""
        self.users, self.taken = counts.nonzero()[:, 0], index[counts]  # on the host
        users = self.users[self.taken.argsort(stable=True)]
        uses = self.taken.bincount(minlength=total)
        first = uses.cumsum(0) - uses
        self.index, self.length, self.total = index.to(device), len(index), total
        self.adjoint: list[tuple[int, Tensor, Tensor]] = []  # (how often used, rows, their users)
        for n in uses.unique().tolist():
            rows = (uses == n).nonzero()[:, 0]
            self.adjoint.append(
                (n, rows.to(device), users[(first[rows][:, None] + torch.arange(n)).flatten()].to(device))
            )

    def __call__(self, x: Tensor) -> Tensor:
        return _Select.apply(x.reshape(self.total, x.shape[-1]), self)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rows: _Rows):
        ctx.rows = rows
        return x.index_select(0, rows.index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        out = grad.new_empty(ctx.rows.total, grad.shape[1])
        for n, rows, users in ctx.rows.adjoint:
            if n == 0:
                out.index_fill_(0, rows, 0)
            else:
                gathered = grad.index_select(0, users)
                out.index_copy_(0, rows, gathered if n == 1 else gathered.view(len(rows), n, -1).sum(1))
        return out, None


SCORES = 1 << 20  # scores of one head that a call may have before more segments join it


def _group_segments(segments: list[PackedSegment], above: list[np.ndarray]) -> list[list[int]]:
    """Which segments go into one call: those of similar length under contexts of
    similar length, so that little is padded.
    """
    ordered = sorted(range(len(segments)), key=lambda i: (len(above[i]).bit_length(), -segments[i].length))
    calls: list[list[int]] = []
    deepest = 0  # of the last call's contexts
    for i in ordered:
        context, length = len(above[i]), segments[i].length
        if calls:
            first, most = calls[-1][0], max(deepest, context)
            longest = segments[first].length
            alike = context.bit_length() == len(above[first]).bit_length() and length >= 0.5 * longest
            if alike and (len(calls[-1]) + 1) * longest * (most + longest) <= SCORES:
                calls[-1].append(i)
                deepest = most
                continue
        calls.append([i])
        deepest = context
    return calls


class AttentionCall:
    """One attention call: S segments padded to L, each after the tokens above it, padded to P.

    queries  [S,L]    places of the segments' tokens; a padded query repeats the last one
    keys     [S,P+L]  places of the tokens above, then of the own ones; a padded key repeats some token
    real, used        the same with -1 for what is only padding
    """

    def __init__(self, segments: list[PackedSegment], above: list[np.ndarray], device: torch.device | str) -> None:
        length = torch.tensor([s.length for s in segments])[:, None]
        depth = torch.tensor([len(places) for places in above])[:, None]
        start = torch.tensor([s.start for s in segments])[:, None]
        own, over = torch.arange(int(length.max())), torch.arange(int(depth.max()))
        context = torch.full((len(segments), len(over)), -1)
        for row, places in enumerate(above):
            context[row, : len(places)] = torch.from_numpy(places)
        self.queries = start + torch.minimum(own, length - 1)
        self.real = torch.where(own < length, self.queries, -1)
        self.keys = torch.cat([context.clamp_min(0), self.queries], 1)
        self.used = torch.cat([context, self.real], 1)
        self.at = (depth + own).to(device)  # [S,L] position of each query in its own sequence
        # [S,P+L] of each key, -1 for none
        self.of = torch.cat([torch.where(over < depth, over, -1), depth + own], 1).to(device)
        if bool((depth == depth[0]).all()):  # one mask for all rows
            self.at, self.of = self.at[:1], self.of[:1]
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def distance(self) -> Tensor:
        """[S or 1, 1, L, P+L] from a query back to a key."""
        return (self.at[:, :, None] - self.of[:, None])[:, None]

    def attention_mask(self, rule: ScoreRule) -> Tensor:
        """[S or 1, 1, L, P+L]: True where a query may look. A padded own key lies after every real query."""
        if rule.reach not in self._masks:
            seen = rule.visible(self.at[:, None, :, None], self.distance())
            self._masks[rule.reach] = seen & (self.of >= 0)[:, None, None]
        return self._masks[rule.reach]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        causal = self.keys.shape[1] == self.queries.shape[1] and rule.sees_all(self.queries.shape[1])
        per_head = rule.softcap is not None or rule.slopes is not None
        row = len(q) * self.keys.shape[1] * (q.shape[1] if per_head else 1)
        if row * q.shape[2] > LONG and (per_head or rule.sinks is not None or not causal):
            return self._attend_blocks(q, k, v, rule, max(1, LONG // row))
        distance = None if rule.slopes is None else self.distance()
        mask = None if causal else self.attention_mask(rule)
        if mask is not None and rule.chosen is not None:
            mask = mask & is_chosen(rule.chosen[self.queries.to(q.device)], self.of)[:, None]
        return sdpa(q, k, v, rule, mask=mask, distance=distance, train=True)

    def _attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, size: int) -> Tensor:
        """The same, `size` queries at a time, each block under a mask of its own over the keys up to its last query.

        Kernels keep their mask for the backward pass. Here a block is computed again in it, so that what is kept grows
        with the length of a sample and not with its square.
        """
        context, length = self.keys.shape[1] - self.queries.shape[1], q.shape[2]

        def attend_block(first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at, of = self.at[:, first : first + q.shape[2]], self.of[:, : k.shape[2]]
            distance = (at[:, :, None] - of[:, None])[:, None]
            mask = rule.visible(at[:, None, :, None], distance) & (of >= 0)[:, None, None]
            if rule.chosen is not None:
                places = self.queries[:, first : first + q.shape[2]].to(q.device)
                mask = mask & is_chosen(rule.chosen[places], of)[:, None]
            return sdpa(q, k, v, rule, mask=mask, distance=distance, train=True)

        blocks = []
        for first in range(0, length, size):
            last = min(first + size, length)
            rows = q[:, :, first:last], k[:, :, : context + last], v[:, :, : context + last]
            if torch.is_grad_enabled():
                blocks.append(checkpoint(attend_block, first, *rows, use_reentrant=False, preserve_rng_state=False))
            else:
                blocks.append(attend_block(first, *rows))
        return torch.cat(blocks, 2)


# -- serving -------------------------------------------------------------------------------------


class CachePool(Protocol):
    """Keys or values of every layer. Heads come first, so that a gathered context is one
    matrix a head and nothing is copied again.
    """

    @property
    def data_pointers(self) -> list[int]:
        """Where the layers lie that have been written."""

    def layer_pool(self, layer: int, like: Tensor) -> Tensor:
        """The layer's pool [K,pages,D] for tokens like [T,K,D]."""


class PoolSlots:
    """Slots of any shape in a pool, and the rows they are when heads and pages are one axis, made once a step."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self._rows: dict[int, Tensor] = {}

    def read(self, pool: Tensor) -> Tensor:
        """Slots [B,C] of a pool [K,pages,D] -> [K*B,C,D]."""
        return pool.flatten(0, 1).index_select(0, self._flat_slots(pool)).view(-1, self.slots.shape[-1], pool.shape[-1])

    def write(self, pool: Tensor, new: Tensor) -> None:
        """New tokens [T,K,D] into slots [T]."""
        pool.flatten(0, 1).index_copy_(0, self._flat_slots(pool), new.transpose(0, 1).flatten(0, 1))

    def _flat_slots(self, pool: Tensor) -> Tensor:
        heads, pages = pool.shape[:2]
        if heads not in self._rows:
            self._rows[heads] = (
                self.slots.flatten() + torch.arange(heads, device=pool.device)[:, None] * pages
            ).flatten()
        return self._rows[heads]


@dataclass(slots=True)
class PrefillChunk:
    """New tokens [start, start+length) of the step that belong to one request, and the slots of its whole context."""

    start: int
    length: int
    context: Tensor  # [C] slots, the new tokens' own at the end
    slots: PoolSlots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = PoolSlots(self.context[None])


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """Requests that feed one token each; siblings read the context they have in common once, as one dense block.

    own      [B,C]  slots of each request's own context, padded with slot 0      lengths [B] how
             many are real, the new token included
    prefix   [F,P]  slots that all members of a family share, padded with 0      shared  [F] how many are real
    grid     [F,S]  rows of the members, padded with row 0                       place   [B]
             where each row stands in the flat grid
    Without `prefix` the own context is the whole.
    """

    own: Tensor
    lengths: Tensor
    prefix: Tensor | None = None
    shared: Tensor | None = None
    grid: Tensor | None = None
    place: Tensor | None = None
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)
    near: PoolSlots = field(init=False)
    above: PoolSlots | None = field(init=False)

    def __post_init__(self) -> None:
        self.near = PoolSlots(self.own)
        self.above = None if self.prefix is None else PoolSlots(self.prefix)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        """q [B,H,D], pools [K,pages,D] -> [B,H,D]. The query heads of one key head become
        its queries R: no copy of the keys.
        """
        rows, heads, size = len(q), len(keys), values.shape[-1]
        folded = q.view(rows, heads, -1, q.shape[-1]).transpose(0, 1).flatten(0, 1)  # [K*B,R,D]
        repeats = folded.shape[1]
        k, v = self.near.read(keys), self.near.read(values)
        scores = torch.bmm(folded, k.transpose(1, 2))  # [K*B,R,C]
        if self.above is not None:
            above_k, above_v = self.above.read(keys), self.above.read(values)
            scores = torch.cat(
                [self._by_row(torch.bmm(self._by_family(folded, heads), above_k.transpose(1, 2)), heads), scores], -1
            )
        scores = rule.capped(scores.float().view(heads, rows, repeats, -1).mul_(rule.scale))
        if rule.slopes is not None:
            scores = rule.with_slopes(scores, self.distance()[:, None], heads, 1, repeats, 1)
        seen = self.attention_mask(rule)
        if rule.chosen is not None:
            seen = seen & is_chosen(rule.chosen[-rows:, None], self.positions())
        scores = scores.masked_fill_(~seen, float("-inf"))
        weights = rule.softmax(scores, heads, 1, repeats, 1).to(v.dtype).reshape(heads * rows, repeats, -1)
        if self.above is None:
            out = torch.bmm(weights, v)
        else:
            common = above_k.shape[1]
            over = self._by_row(torch.bmm(self._by_family(weights[..., :common], heads), above_v), heads)
            out = torch.bmm(weights[..., common:], v).add_(over)
        return out.view(heads, rows, repeats, size).transpose(0, 1).reshape(rows, -1, size)

    def distance(self) -> Tensor:
        """[B,P+C] from the new token back to each key; below zero for what pads the own context."""
        distance = self.lengths[:, None] - 1 - torch.arange(self.own.shape[1], device=self.own.device)
        if self.prefix is None:
            return distance
        over = torch.arange(self.prefix.shape[1], device=self.own.device)
        return torch.cat([self.lengths[:, None] - 1 + self._shared_length() - over, distance], 1)

    def positions(self) -> Tensor:
        """[B,P+C] of each key in its sequence; ALL for padding."""
        whole = ScoreRule(1.0)
        shared = 0 if self.prefix is None else self._shared_length()
        return (self.lengths[:, None] - 1 + shared - self.distance()).masked_fill(
            ~self.attention_mask(whole)[:, 0], ALL
        )

    def context_keys(self, pool: Tensor) -> Tensor:
        """[B,P+C,D] of a pool with one head."""
        near = self.near.read(pool)
        if self.above is None:
            return near
        assert self.place is not None and self.grid is not None
        return torch.cat([self.above.read(pool)[self.place // self.grid.shape[1]], near], 1)

    def attention_mask(self, rule: ScoreRule) -> Tensor:
        """[B,1,P+C]: True where the new token may look."""
        if rule.reach not in self.masks:
            shared = 0 if self.prefix is None else self._shared_length()
            seen = rule.visible(self.lengths[:, None] - 1 + shared, self.distance())
            if self.prefix is not None:
                real = torch.arange(self.prefix.shape[1], device=self.own.device) < shared
                seen = seen & F.pad(real, (0, self.own.shape[1]), value=True)
            self.masks[rule.reach] = seen[:, None, :]
        return self.masks[rule.reach]

    def _shared_length(self) -> Tensor:
        """[B,1] how many tokens of its family's prefix each row has."""
        assert self.shared is not None and self.place is not None and self.grid is not None
        return self.shared[self.place // self.grid.shape[1]][:, None]

    def _by_family(self, x: Tensor, heads: int) -> Tensor:
        """[K*B,R,N] -> [K*F,S*R,N]."""
        assert self.grid is not None
        families, members = self.grid.shape
        rows = x.view(heads, -1, *x.shape[1:]).index_select(1, self.grid.flatten())
        return rows.view(heads * families, members * x.shape[1], x.shape[2])

    def _by_row(self, x: Tensor, heads: int) -> Tensor:
        """[K*F,S*R,N] -> [K*B,R,N]."""
        assert self.grid is not None and self.place is not None
        families, members = self.grid.shape
        rows = x.view(heads, families * members, -1, x.shape[2])
        return rows.index_select(1, self.place).flatten(0, 1)


class PagedLayout:
    """One engine step: prefill chunks first, then one token for each decoding request.
    write [T]: slot of every new token.
    """

    def __init__(
        self,
        keys: CachePool,
        values: CachePool,
        write: Tensor,
        chunks: list[PrefillChunk],
        decoding: DecodeBatch | None = None,
    ) -> None:
        self.states: SlotStates | None = None  # of a model with recurrent layers
        self.keys, self.values, self.write, self.chunks, self.decoding = keys, values, write, chunks, decoding
        self._into = PoolSlots(write)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        keys, values = self.store_kv(layer, k, v)
        parts = [self._attend_prefill(chunk, q, keys, values, rule) for chunk in self.chunks]
        if self.decoding is not None:
            last = q[len(q) - len(self.decoding.own) :]
            parts.append(self.decoding.attend(last, keys, values, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> Tensor:
        """Positions [T,k] of the keys that an indexer chooses. Its own keys are cached as those of a layer below zero."""
        pool = self.keys.layer_pool(-1 - layer, tokens.k[:, None])
        self._into.write(pool, tokens.k[:, None])
        return choose_over_pages(self.chunks, self.decoding, pool, tokens)

    def store_kv(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The new tokens' keys and values into the layer's pools -> both pools."""
        keys, values = self.keys.layer_pool(layer, k), self.values.layer_pool(layer, v)
        self._into.write(keys, k)
        self._into.write(values, v)
        return keys, values

    def _attend_prefill(self, chunk: PrefillChunk, q: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        new, context = chunk.length, len(chunk.context)
        k, v = (chunk.slots.read(pool).unsqueeze(0) for pool in (keys, values))
        mine = q[chunk.start : chunk.start + new].transpose(0, 1).unsqueeze(0)
        mask = distance = None
        if new < context or not rule.sees_all(context) or rule.slopes is not None:
            at = torch.arange(context - new, context, device=q.device)[:, None]
            distance = at - torch.arange(context, device=q.device)
            mask = rule.visible(at, distance)
            if rule.chosen is not None:
                of = torch.arange(context, device=q.device)[None]
                mask = mask & is_chosen(rule.chosen[None, chunk.start : chunk.start + new], of)[0]
        return sdpa(mine, k, v, rule, mask=mask, distance=distance)[0].transpose(0, 1)
