"""Attention of packed training in kernels, for GPUs: no mask, no padding, no copy of a shared prompt.

    tiles [W, 2]      segment of a program and its first token       segments [S, 4]   start, length, tokens above,
                                                                                       whether it is causal
    above, below      for each segment those that it sees (its ancestors from the root down, itself last), and those
                      that see it, itself first; as runs of one list of numbers, from `first[i]` to `first[i + 1]`

    forward    a program: one tile of queries, one head    for each segment above: blocks of keys, online softmax
    dq         the same                                    p = exp(s - lse), ds = p (dp - delta), dq = ds K
    dk, dv     a program: one tile of keys, one query      for each segment below: blocks of queries; summed over the
               head                                        heads of one key head by torch, in fp32

    o = sum_j p_j v_j    lse = log sum_j exp s_j    delta = sum_d do o - dlse      FlashAttention-2: arXiv:2307.08691

Positions decide what a window or a chunk hides, as in models/packed_layout.py, whose layouts are the plain code.
The order of all sums is fixed. Tests compare both through Triton's interpreter and compile for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from rondel.models.dense_attention import ScoreRule

# of what is masked: finite, so that a row that sees nothing in a block stays a number
NEGATIVE = tl.constexpr(-1.0e30)


class TreeSegment(Protocol):
    """What models/packed_layout.py says of a run of packed tokens."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def causal(self) -> bool: ...


class TreeTile(NamedTuple):
    """What a program takes at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_of(size: int, element: int, *, backward: bool) -> TreeTile:
    """For heads of `size` numbers, `element` bytes each: what fits into the 99 KiB of shared memory of small cards."""
    if element > 2 or size > 128:
        return TreeTile(32, 32, 4, 1)
    return TreeTile(64, 64, 4, 2) if backward or size > 64 else TreeTile(128, 64, 4, 2)


class TreeTraffic(NamedTuple):
    """Bytes that the kernels load and store; what a cache keeps is counted each time."""

    forward: int
    dq: int
    dkv: int


def bytes_moved(
    segments: Sequence[TreeSegment], heads: int, size: int, wide: int, element: int, tiles: tuple[TreeTile, TreeTile]
) -> TreeTraffic:
    """Of causal attention that hides nothing, with `element` bytes a number; `tiles` of the forward and backward pass.

    A tile of queries is read once and meets every key above it once; a tile of keys meets all queries below it, from
    the tile on that begins at or before its first one. Indices are 4 bytes each.
    """
    above, _, below = _relations(segments)
    row, keys = size * element, (size + wide) * element
    forward = dq = dkv = 0
    for i, segment in enumerate(segments):
        for tile, is_backward in zip(tiles, (False, True), strict=True):
            for first in range(0, segment.length, tile.queries):
                last = min(first + tile.queries, segment.length)
                seen = sum(segments[j].length for j in above[i][:-1]) + last
                indices = 4 * (2 + 4 + 2 + 4 * len(above[i]))
                own = (last - first) * (row + (wide * element + 8 + row if is_backward else wide * element + 4))
                moved = heads * (indices + own + seen * keys)
                forward, dq = (forward, dq + moved) if is_backward else (forward + moved, dq)
        tile = tiles[1]
        for first in range(0, segment.length, tile.keys):
            count = min(first + tile.keys, segment.length) - first
            asking = segment.length - first // tile.queries * tile.queries
            asking += sum(segments[j].length for j in below[i][1:])
            indices = 4 * (2 + 3 + 2 + 5 * len(below[i]))
            read = count * keys + asking * (row + wide * element + 8)
            dkv += heads * (indices + read + count * (size + wide) * 4)
    return TreeTraffic(forward, dq, dkv)


def _relations(segments: Sequence[TreeSegment]) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Of each segment: those that it sees, itself last; the tokens above it; those that see it, itself first."""
    above: list[list[int]] = []
    depth: list[int] = []
    below: list[list[int]] = [[] for _ in segments]
    for i, segment in enumerate(segments):
        up = segment.parent
        above.append([i] if up is None else [*above[up], i])
        depth.append(0 if up is None else depth[up] + segments[up].length)
        for j in reversed(above[i]):
            below[j].append(i)
    return above, depth, below


@dataclass(slots=True, eq=False)
class SegmentTree:
    """Who sees whom, as the kernels read it."""

    segments: Tensor  # [S, 4] int32
    above: tuple[Tensor, Tensor]  # first [S + 1], numbers
    below: tuple[Tensor, Tensor]
    lengths: Sequence[int]
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def from_segments(cls, segments: Sequence[TreeSegment], device: torch.device | str) -> SegmentTree:
        above, depth, below = _relations(segments)
        rows = [(s.start, s.length, d, int(s.causal)) for s, d in zip(segments, depth, strict=True)]
        return cls(
            torch.tensor(rows, dtype=torch.int32).view(-1, 4).to(device),
            _runs(above, device),
            _runs(below, device),
            [s.length for s in segments],
        )

    def tiles(self, size: int) -> Tensor:
        """[W, 2]: every segment in tiles of `size` tokens."""
        if size not in self._tiles:
            tiles = [(i, first) for i, n in enumerate(self.lengths) for first in range(0, n, size)]
            self._tiles[size] = torch.tensor(tiles, dtype=torch.int32).view(-1, 2).to(self.segments.device)
        return self._tiles[size]


def _runs(lists: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    first = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0).to(torch.int32)
    return first.to(device), torch.tensor([i for one in lists for i in one], dtype=torch.int32).to(device)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: SegmentTree, rule: ScoreRule) -> Tensor:
    """q [T,H,D], k [T,K,D], v [T,K,V] of one dtype -> [T,H,V]. No slopes, chosen keys or images."""
    out, lse = _TreeAttention.apply(q, k, v, tree, rule)
    return out if rule.sinks is None else (out * rule.sink_share(lse).unsqueeze(-1)).to(out.dtype)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, tree: SegmentTree, rule: ScoreRule):
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        (tokens, heads, size), wide = q.shape, v.shape[2]
        out = q.new_empty(tokens, heads, wide)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        tile = tile_of(max(size, wide), q.element_size(), backward=False)
        tiles = tree.tiles(tile.queries)
        if len(tiles):
            _forward_kernel[(len(tiles), heads)](
                q, k, v, tiles, tree.segments, *tree.above, out, lse, *_numbers(q, k, v, rule), **_fixed(q, k, v, tile)
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.rule = tree, rule
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None):
        q, k, v, out, lse = ctx.saved_tensors
        tree, rule, (tokens, heads, size) = ctx.tree, ctx.rule, q.shape
        grad = torch.zeros_like(out) if grad is None else grad.to(out.dtype).contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse
        tile = tile_of(max(size, v.shape[2]), q.element_size(), backward=True)
        given = (q, k, v, grad, lse, delta)
        numbers, fixed = _numbers(q, k, v, rule), _fixed(q, k, v, tile)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.empty(tokens, heads, size, dtype=torch.float32, device=q.device)
        dv = torch.empty(tokens, heads, v.shape[2], dtype=torch.float32, device=q.device)
        if len(tiles := tree.tiles(tile.queries)):
            _dq_kernel[(len(tiles), heads)](*given, tiles, tree.segments, *tree.above, dq, *numbers, **fixed)
            tiles = tree.tiles(tile.keys)
            _dkv_kernel[(len(tiles), heads)](*given, tiles, tree.segments, *tree.below, dk, dv, *numbers, **fixed)
        dk, dv = (x.view(tokens, k.shape[1], -1, x.shape[2]).sum(2).to(k.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None


def _numbers(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> tuple[Any, ...]:
    strides = (x.stride(i) for x in (q, k, v) for i in (0, 1))
    return rule.scale, rule.softcap or 0.0, rule.window or 0, rule.chunk or 0, q.shape[1], *strides


def _fixed(q: Tensor, k: Tensor, v: Tensor, tile: TreeTile) -> dict[str, Any]:
    size, wide = q.shape[2], v.shape[2]
    return {
        "REPEATS": q.shape[1] // k.shape[1], "QUERIES": tile.queries, "KEYS": tile.keys, "SIZE": size, "WIDE": wide,
        "SIZE_P": _next_power(size), "WIDE_P": _next_power(wide), "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _next_power(n: int) -> int:
    """The next power of two, 16 at least: what a product of Triton takes."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _rows_of(base, token, real, head, by_token, by_head, SIZE: tl.constexpr, SIZE_P: tl.constexpr):
    """Rows of one head [N, SIZE_P]; 0 where there is none."""
    d = tl.arange(0, SIZE_P)
    place = base + token.to(tl.int64)[:, None] * by_token + head * by_head + d[None, :]
    return tl.load(place, mask=real[:, None] & (d[None, :] < SIZE), other=0.0)


@triton.jit
def _store_rows(base, token, real, head, heads, rows, SIZE: tl.constexpr, SIZE_P: tl.constexpr):
    """The reverse, into a contiguous [T, heads, SIZE]."""
    d = tl.arange(0, SIZE_P)
    place = base + (token.to(tl.int64)[:, None] * heads + head) * SIZE + d[None, :]
    tl.store(place, rows.to(base.dtype.element_ty), mask=real[:, None] & (d[None, :] < SIZE))


@triton.jit
def _capped(scores, softcap):
    """Scaled scores -> those under the softcap, and what their gradient is multiplied with."""
    bend = tl.full(scores.shape, 1.0, tl.float32)
    if softcap > 0.0:
        bent = 2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0  # tanh
        scores, bend = softcap * bent, 1.0 - bent * bent
    return scores, bend


@triton.jit
def _sees(at, asks, of, real, window, spans):
    """Positions of queries [Q], whether these exist, positions of keys [K], whether these exist -> [Q, K]."""
    distance = at[:, None] - of[None, :]
    sees = asks[:, None] & real[None, :] & (distance >= 0)
    sees = sees & ((window <= 0) | (distance < window))
    return sees & (of[None, :] // spans == at[:, None] // spans)


@triton.jit
def _first_key(at, window, spans):
    """The first position that a query at the position `at`, or any after it, sees."""
    nearest = tl.where(window > 0, tl.maximum(at - window + 1, 0), 0)
    return tl.maximum(nearest, at // spans * spans)


@triton.jit
def _forward_kernel(
    q, k, v, tiles, segments, first, above, out, lse, scale, softcap, window, chunk, heads,
    q_token, q_head, k_token, k_head, v_token, v_head,
    REPEATS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    SIZE_P: tl.constexpr, WIDE_P: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    own, begin = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    start, length = tl.load(segments + own * 4), tl.load(segments + own * 4 + 1)
    depth, causal = tl.load(segments + own * 4 + 2), tl.load(segments + own * 4 + 3)
    spans = tl.where(chunk > 0, chunk, 1 << 30)  # a chunk of all positions is no chunk

    row = begin + tl.arange(0, QUERIES)
    asks = row < length
    at = depth + tl.where(causal > 0, row, length - 1)
    least = _first_key(depth + tl.where(causal > 0, begin, length - 1), window, spans)
    ask = _rows_of(q, start + row, asks, head, q_token, q_head, SIZE, SIZE_P)
    best = tl.full([QUERIES], NEGATIVE, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDE_P], tl.float32)
    for which in range(tl.load(first + own), tl.load(first + own + 1)):
        segment = tl.load(above + which)
        at_key, over = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 2)
        end = tl.load(segments + segment * 4 + 1)
        end = tl.where((segment == own) & (causal > 0), tl.minimum(begin + QUERIES, end), end)
        for block in range(tl.maximum(least - over, 0) // KEYS * KEYS, end, KEYS):
            column = block + tl.arange(0, KEYS)
            real = column < end
            key = _rows_of(k, at_key + column, real, head // REPEATS, k_token, k_head, SIZE, SIZE_P)
            scores, _ = _capped(tl.dot(ask, tl.trans(key), input_precision="ieee") * scale, softcap)
            sees = _sees(at, asks, over + column, real, window, spans)
            scores = tl.where(sees, scores, NEGATIVE)
            higher = tl.maximum(best, tl.max(scores, 1))
            weight = tl.where(sees, tl.exp(scores - higher[:, None]), 0.0)
            fade = tl.exp(best - higher)
            value = _rows_of(v, at_key + column, real, head // REPEATS, v_token, v_head, WIDE, WIDE_P)
            sums = sums * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            total = total * fade + tl.sum(weight, 1)
            best = higher
    some = tl.where(total > 0.0, total, 1.0)
    _store_rows(out, start + row, asks, head, heads, sums / some[:, None], WIDE, WIDE_P)
    tl.store(lse + (start + row).to(tl.int64) * heads + head, best + tl.log(some), mask=asks)


@triton.jit
def _score_gradients(ask, key, value, up, whole, lost, sees, scale, softcap):
    """-> p and ds over the scale, both [Q, K] in fp32."""
    scores, bend = _capped(tl.dot(ask, tl.trans(key), input_precision="ieee") * scale, softcap)
    p = tl.where(sees, tl.exp(scores - whole[:, None]), 0.0)
    dp = tl.dot(up, tl.trans(value), input_precision="ieee")
    return p, p * (dp - lost[:, None]) * bend


@triton.jit
def _dq_kernel(
    q, k, v, grad, lse, delta, tiles, segments, first, above, out, scale, softcap, window, chunk, heads,
    q_token, q_head, k_token, k_head, v_token, v_head,
    REPEATS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    SIZE_P: tl.constexpr, WIDE_P: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    own, begin = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    start, length = tl.load(segments + own * 4), tl.load(segments + own * 4 + 1)
    depth, causal = tl.load(segments + own * 4 + 2), tl.load(segments + own * 4 + 3)
    spans = tl.where(chunk > 0, chunk, 1 << 30)

    row = begin + tl.arange(0, QUERIES)
    asks = row < length
    at = depth + tl.where(causal > 0, row, length - 1)
    least = _first_key(depth + tl.where(causal > 0, begin, length - 1), window, spans)
    ask = _rows_of(q, start + row, asks, head, q_token, q_head, SIZE, SIZE_P)
    up = _rows_of(grad, start + row, asks, head, heads * WIDE, WIDE, WIDE, WIDE_P)
    place = (start + row).to(tl.int64) * heads + head
    whole, lost = tl.load(lse + place, mask=asks, other=0.0), tl.load(delta + place, mask=asks, other=0.0)
    sums = tl.zeros([QUERIES, SIZE_P], tl.float32)
    for which in range(tl.load(first + own), tl.load(first + own + 1)):
        segment = tl.load(above + which)
        at_key, over = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 2)
        end = tl.load(segments + segment * 4 + 1)
        end = tl.where((segment == own) & (causal > 0), tl.minimum(begin + QUERIES, end), end)
        for block in range(tl.maximum(least - over, 0) // KEYS * KEYS, end, KEYS):
            column = block + tl.arange(0, KEYS)
            real = column < end
            key = _rows_of(k, at_key + column, real, head // REPEATS, k_token, k_head, SIZE, SIZE_P)
            value = _rows_of(v, at_key + column, real, head // REPEATS, v_token, v_head, WIDE, WIDE_P)
            sees = _sees(at, asks, over + column, real, window, spans)
            _, ds = _score_gradients(ask, key, value, up, whole, lost, sees, scale, softcap)
            sums += tl.dot(ds.to(key.dtype), key, input_precision="ieee")
    _store_rows(out, start + row, asks, head, heads, sums * scale, SIZE, SIZE_P)


@triton.jit
def _dkv_kernel(
    q, k, v, grad, lse, delta, tiles, segments, first, below, dk, dv, scale, softcap, window, chunk, heads,
    q_token, q_head, k_token, k_head, v_token, v_head,
    REPEATS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    SIZE_P: tl.constexpr, WIDE_P: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    own, begin = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    start, length = tl.load(segments + own * 4), tl.load(segments + own * 4 + 1)
    over = tl.load(segments + own * 4 + 2)
    spans = tl.where(chunk > 0, chunk, 1 << 30)

    column = begin + tl.arange(0, KEYS)
    real = column < length
    of = over + column
    key = _rows_of(k, start + column, real, head // REPEATS, k_token, k_head, SIZE, SIZE_P)
    value = _rows_of(v, start + column, real, head // REPEATS, v_token, v_head, WIDE, WIDE_P)
    of_keys = tl.zeros([KEYS, SIZE_P], tl.float32)
    of_values = tl.zeros([KEYS, WIDE_P], tl.float32)
    for which in range(tl.load(first + own), tl.load(first + own + 1)):
        segment = tl.load(below + which)
        at_query, end = tl.load(segments + segment * 4), tl.load(segments + segment * 4 + 1)
        depth, causal = tl.load(segments + segment * 4 + 2), tl.load(segments + segment * 4 + 3)
        # those before the first key do not see it, and those too far behind the last one do not either
        low = tl.where((segment == own) & (causal > 0), begin // QUERIES * QUERIES, 0)
        last = over + tl.minimum(begin + KEYS, length) - 1
        behind = tl.where(window > 0, last + window, 1 << 30)
        behind = tl.minimum(behind, (last // spans + 1) * spans)
        high = tl.where(causal > 0, tl.minimum(end, tl.maximum(behind - depth, 0)), end)
        for block in range(low, high, QUERIES):
            row = block + tl.arange(0, QUERIES)
            asks = row < end
            at = depth + tl.where(causal > 0, row, end - 1)
            ask = _rows_of(q, at_query + row, asks, head, q_token, q_head, SIZE, SIZE_P)
            up = _rows_of(grad, at_query + row, asks, head, heads * WIDE, WIDE, WIDE, WIDE_P)
            place = (at_query + row).to(tl.int64) * heads + head
            whole, lost = tl.load(lse + place, mask=asks, other=0.0), tl.load(delta + place, mask=asks, other=0.0)
            sees = _sees(at, asks, of, real, window, spans)
            p, ds = _score_gradients(ask, key, value, up, whole, lost, sees, scale, softcap)
            of_values += tl.dot(tl.trans(p.to(up.dtype)), up, input_precision="ieee")
            of_keys += tl.dot(tl.trans(ds.to(ask.dtype)), ask, input_precision="ieee")
    _store_rows(dk, start + column, real, head, heads, of_keys * scale, SIZE, SIZE_P)
    _store_rows(dv, start + column, real, head, heads, of_values, WIDE, WIDE_P)
