"""Attention over pages in one kernel, for GPUs: nothing is gathered, nothing is padded, no length leaves the device.

    table [lines, width]   a line of slots for each running request     feeds [N, 4]   line, first row of
                           q, new tokens, context with them
    tiles [W, 2]           the feed of a program and its first query    a program      one tile, one key
                           head, one split of the context

                 context of one feed, read through its line
    split 0   |--------------|                       the query heads of one key head are rows of one product;
    split 1                  |--------------|        softmax block by block, splits merged by their log-sum-exp
    split 2                                 |-----|  (Flash-Decoding):  o = sum_s exp(lse_s - lse) o_s

Prefill and decoding are the same program: a decoding request is a feed of one new token. Latents
(models/latent_attention.py) are keys whose first numbers are the value, and are read once; all query heads share
them, so the heads of a program are some of these.

The tests compare it with the layout of models/paged_layout.py through Triton's
interpreter, and compile it for sm_80, sm_86 and
sm_90, all on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rondel.models.cache_pools import upload

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.dense_attention import ScoreRule

# of a context where few tokens are new: work for a whole GPU at a batch of one, and the same sums at every batch
SPLITS = 8
FEW = 8  # new tokens up to which a step counts as decoding
# of what is masked: finite, so that a row that sees nothing in its split stays a number
NEGATIVE = tl.constexpr(-1.0e30)


class TokenRun(NamedTuple):
    """New tokens of one request: their line of the table, the first row of q, how many, and its context with them."""

    line: int
    row: int
    new: int
    context: int


@dataclass(slots=True, eq=False)
class LaunchBatch:
    """Feeds that are computed by one launch. `new`: how many tokens each has, which is all that
    the host has to know.
    """

    table: Tensor  # [lines, width] int32
    feeds: Tensor  # [N, 4] int32
    new: Sequence[int]
    splits: int
    runs: Sequence[TokenRun] = ()
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def from_runs(cls, table: Tensor, fed: Sequence[TokenRun]) -> LaunchBatch:
        new = [f.new for f in fed]
        feeds = upload(fed, table.device, torch.int32)
        return cls(table, feeds, new, SPLITS if max(new) <= FEW else 1, fed)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        """q [T,H,D], pools [K,pages,D] and [K,pages,V] -> [T,H,V] in q's dtype."""
        tokens, heads, size = q.shape
        shared, wide = keys.shape[0], values.shape[2]
        repeats = heads // shared
        tail = size - wide if values.data_ptr() == keys.data_ptr() else 0
        size -= tail
        shape = KernelShape.for_sizes(repeats, max(self.new), size, wide, q.element_size())
        q = q if q.stride(2) == 1 else q.contiguous()
        # every row of every split is written, also where a split has no keys
        out = q.new_empty(self.splits, tokens, heads, wide, dtype=torch.float32)
        lse = q.new_empty(self.splits, tokens, heads, dtype=torch.float32)
        tiles = self.query_tiles(shape.queries)
        _attention_kernel[(len(tiles), shared, self.splits)](
            q, keys, values, self.table, self.feeds, tiles, out, lse, lse if rule.slopes is None else rule.slopes,
            rule.scale, rule.softcap or 0.0, rule.window or 0, rule.chunk or 0, self.table.stride(0),
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), tokens, heads,
            REPEATS=repeats, QUERIES=shape.queries, ROWS=shape.rows, BLOCK=shape.block, SIZE=size, WIDE=wide,
            TAIL=tail, TAIL_P=_next_power(tail), SIZE_P=_next_power(size), WIDE_P=_next_power(wide), SPLITS=self.splits,
            SLOPES=rule.slopes is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
        merged, sinks = torch.empty(tokens, heads, wide, dtype=q.dtype, device=q.device), rule.sinks
        if tokens:
            _merge_kernel[(tokens, heads)](
                out, lse, lse if sinks is None else sinks, merged, tokens * heads, heads,
                SPLITS=self.splits, WIDE=wide, WIDE_P=_next_power(wide), SINKS=sinks is not None, num_warps=1,
            )  # fmt: skip
        return merged

    def attend_latents(self, q: Tensor, pool: Tensor, up: LatentProjection, rule: ScoreRule) -> Tensor:
        """q [T,H,N+E], a pool of latents [1,pages,R+E] -> [T,H,V]: a few new tokens absorbed, prompts expanded."""
        if self.splits > 1:
            groups = pool.expand(_head_groups(q.shape[1]), -1, -1)
            return up.project_values(self.attend(up.absorb_queries(q), groups, groups[..., : up.rank], rule))
        out = []
        for line, row, new, context in self.runs:
            latents = pool[0, self.table[line, :context].long()]
            expanded = up.of_rows(row, new).expand(latents[:, : up.rank], latents[:, up.rank :])
            keys, values = (x.transpose(0, 1) for x in expanded)
            places = torch.arange(context, dtype=torch.int32, device=q.device)[None]
            whole = LaunchBatch.from_runs(places, [TokenRun(0, 0, new, context)])
            out.append(whole.attend(q[row : row + new], keys, values, rule))
        return torch.cat(out)

    def query_tiles(self, queries: int) -> Tensor:
        if queries not in self._tiles:
            tiles = [(at, first) for at, new in enumerate(self.new) for first in range(0, new, queries)]
            self._tiles[queries] = upload(tiles, self.table.device, torch.int32)
        return self._tiles[queries]


class KernelShape(NamedTuple):
    """What one program takes: `rows` of q (queries times the heads of one key head), and `block` keys at a time."""

    queries: int
    rows: int
    block: int

    @classmethod
    def for_sizes(cls, repeats: int, new: int, size: int, wide: int, element: int) -> KernelShape:
        """Small enough for the 99 KiB of shared memory that sm_86 and sm_89 have."""
        width = element * _next_power(max(size, wide))  # bytes of a row
        most = 64 if width <= 256 else 32 if width <= 512 else 16
        queries = max(1, min(new, most // repeats))
        return cls(queries, _next_power(queries * repeats), 64 if width <= 256 else 32)


def _head_groups(heads: int) -> int:
    """Groups of equal size, of at most 16 query heads: what one program takes."""
    return next(groups for groups in range(1, heads + 1) if heads % groups == 0 and heads // groups <= 16)


def _next_power(n: int) -> int:
    """The next power of two, 16 at least: what a product of Triton takes."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _attention_kernel(
    q,
    keys,
    values,
    table,
    feeds,
    tiles,
    out,
    lse,
    slopes,
    scale,
    softcap,
    window,
    chunk,
    width,
    q_token,
    q_head,
    k_head,
    k_page,
    v_head,
    v_page,
    tokens,
    heads,
    REPEATS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_P: tl.constexpr,
    SIZE_P: tl.constexpr,
    WIDE_P: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOPES: tl.constexpr,
):
    tile, shared, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    feed, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    line, start = tl.load(feeds + feed * 4).to(tl.int64), tl.load(feeds + feed * 4 + 1).to(tl.int64)
    new, length = tl.load(feeds + feed * 4 + 2), tl.load(feeds + feed * 4 + 3)

    row = tl.arange(0, ROWS)
    query = first + row // REPEATS  # of the feed's new tokens
    head = shared * REPEATS + row % REPEATS
    mine = (row < QUERIES * REPEATS) & (query < new)
    at = length - new + query  # position in the context
    size, wide = tl.arange(0, SIZE_P), tl.arange(0, WIDE_P)
    token = start + query
    ask = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + size[None, :],
        mask=mine[:, None] & (size[None, :] < SIZE),
        other=0.0,
    )

    if TAIL > 0:  # numbers of a key behind those that are its value too
        tail = tl.arange(0, TAIL_P)
        ask_tail = tl.load(
            q + token[:, None] * q_token + head[:, None] * q_head + SIZE + tail[None, :],
            mask=mine[:, None] & (tail[None, :] < TAIL),
            other=0.0,
        )

    last = length - new + tl.minimum(first + QUERIES, new)  # keys end before
    begin = tl.where(window > 0, tl.maximum(length - new + first - window + 1, 0), 0)
    spans = tl.where(chunk > 0, chunk, 1 << 30)  # a chunk of all positions is no chunk
    begin = tl.maximum(begin, (length - new + first) // spans * spans)
    share = tl.cdiv(tl.cdiv(last - begin, SPLITS), BLOCK) * BLOCK
    begin = begin + split * share
    end = tl.minimum(begin + share, last)

    if SLOPES:
        steep = tl.load(slopes + head, mask=mine, other=0.0).to(tl.float32)
    best = tl.full([ROWS], NEGATIVE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDE_P], tl.float32)
    for block in range(begin, end, BLOCK):
        column = block + tl.arange(0, BLOCK)
        real = column < end
        slot = tl.load(table + line * width + column, mask=real, other=0).to(tl.int64)
        key = tl.load(
            keys + shared * k_head + slot[:, None] * k_page + size[None, :],
            mask=real[:, None] & (size[None, :] < SIZE),
            other=0.0,
        )
        scores = tl.dot(ask, tl.trans(key), input_precision="ieee")
        if TAIL > 0:
            key_tail = tl.load(
                keys + shared * k_head + slot[:, None] * k_page + SIZE + tail[None, :],
                mask=real[:, None] & (tail[None, :] < TAIL),
                other=0.0,
            )
            scores += tl.dot(ask_tail, tl.trans(key_tail), input_precision="ieee")
        scores *= scale
        if softcap > 0.0:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        if SLOPES:
            scores -= steep[:, None] * (at[:, None] - column[None, :]).to(tl.float32)
        sees = mine[:, None] & real[None, :] & (column[None, :] <= at[:, None])
        sees = sees & ((window <= 0) | (at[:, None] - column[None, :] < window))
        sees = sees & (column[None, :] // spans == at[:, None] // spans)
        scores = tl.where(sees, scores, NEGATIVE)
        higher = tl.maximum(best, tl.max(scores, 1))
        weight = tl.where(sees, tl.exp(scores - higher[:, None]), 0.0)
        fade = tl.exp(best - higher)
        if TAIL > 0:
            value = key
        else:
            value = tl.load(
                values + shared * v_head + slot[:, None] * v_page + wide[None, :],
                mask=real[:, None] & (wide[None, :] < WIDE),
                other=0.0,
            )
        sums = sums * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        best = higher

    some = total > 0.0
    place = (split * tokens + token) * heads + head
    tl.store(
        out + place[:, None] * WIDE + wide[None, :],
        sums / tl.where(some, total, 1.0)[:, None],
        mask=mine[:, None] & (wide[None, :] < WIDE),
    )
    tl.store(lse + place, tl.where(some, best + tl.log(tl.where(some, total, 1.0)), NEGATIVE), mask=mine)


@triton.jit
def _merge_kernel(
    out, lse, sinks, merged, each, heads,
    SPLITS: tl.constexpr, WIDE: tl.constexpr, WIDE_P: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Splits of one row of one head, weighted by their share; what a sink takes goes off."""
    row, head = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1), tl.program_id(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDE_P)
    logs = tl.load(lse + split * each + row)
    best = tl.max(logs, 0)
    weights = tl.exp(logs - best)
    total = tl.sum(weights, 0)
    rows = tl.load(
        out + (split[:, None] * each + row) * WIDE + d[None, :],
        mask=(split[:, None] >= 0) & (d[None, :] < WIDE),
        other=0.0,
    )
    whole = tl.sum(rows * weights[:, None], 0) / total
    if SINKS:
        whole = whole * tl.sigmoid(best + tl.log(total) - tl.load(sinks + head).to(tl.float32))
    tl.store(merged + row * WIDE + d, whole.to(merged.dtype.element_ty), mask=d < WIDE)
