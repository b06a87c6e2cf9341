"""Attention in training: packed segments, of which each sees its ancestors whole and itself causally.

T tokens · H query heads · K key/value heads · D head size · S segments of one call ·
L the longest · P most tokens above one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rondel.models.compressed_entries import CompressedEntries, WindowEnds
from rondel.models.cpu_kernels import attend_masked, has_kernels, library, takes_mask
from rondel.models.dense_attention import ScoreRule, is_short, sdpa
from rondel.models.key_choice import IndexedTokens, choose_in_pack, is_chosen
from rondel.models.processor import HALVES, is_widened, multiplies_in_vectors
from rondel.models.recurrent.layout import SegmentStates
from rondel.models.tree_loops import UNIT, TreeTable, attend_tree, takes_tree
from rondel.system.kernel_choice import KernelChoice, choose_kernel

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.tree_attention import SegmentTree

WIDEST = 256  # numbers of a head that the kernel takes
LONG = 1 << 22  # pairs of a query and a key (of a head, where each has its own) in one mask of packed training


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A run of packed tokens: `PackedSegment(start=0, length=55, parent=None)` is a prompt,
    its completions name it as parent. Where it is not `causal`, each of its tokens sees all of them.
    """

    start: int
    length: int
    parent: int | None = None
    causal: bool = True


class PackedLayout:
    """Who sees whom in a packed row: each segment sees its ancestors whole and itself causally, or
    whole.

        tokens   | prompt P | c1 ... | c2 .. | c3 ....... | next prompt ...
        keys     |<- once ->|  one call for segments of similar size: [those above, padded to P][own, padded to L]

    Tokens are gathered into all calls' padded grids at once, head by head, and
    collected at once. Padding exists only in between: padded queries are thrown away, padded keys are masked.
    On a GPU the kernels of models/tree_attention.py read the row as it is, where they can (`choose_kernel`), on some
    CPUs the loops of models/tree_loops.py.
    """

    def __init__(
        self, segments: list[PackedSegment], device: torch.device | str = "cpu", own: Sequence[int] | None = None
    ) -> None:
        """`own`: the segments whose queries are asked for here, one behind the other; all, if not given."""
        self.total, self.device = sum(s.length for s in segments), device
        self._own = range(len(segments)) if own is None else own
        self.first = segments[self._own[0]].start if len(self._own) else 0
        self.rows = sum(segments[i].length for i in self._own)
        self.segments = segments
        self._is_tree = any(s.parent is not None or not s.causal for s in segments)
        self._is_plain = self.rows == self.total and all(s.causal for s in segments)
        self._made: dict[tuple[str, int], SelectRows] = {}  # by what and the number of heads

    @cached_property
    def _above(self) -> list[np.ndarray]:
        """Of each segment: the places of its ancestors' tokens, from the root down."""
        above: list[np.ndarray] = []
        for segment in self.segments:
            up = segment.parent
            over = [] if up is None else [above[up], _segment_positions(self.segments[up])]
            above.append(np.concatenate(over) if over else np.empty(0, np.int64))
        return above

    @cached_property
    def calls(self) -> list[AttentionCall]:
        return [
            AttentionCall([self.segments[i] for i in row], [self._above[i] for i in row], self.device, self.first)
            for row in group_segments(self.segments, self._above, self._own)
        ]

    @cached_property
    def tree(self) -> SegmentTree:
        from rondel.models.tree_attention import SegmentTree  # imports Triton

        return SegmentTree.from_segments(self.segments, self.device)

    @cached_property
    def table(self) -> TreeTable:
        return TreeTable.of_segments(self.segments)

    @cached_property
    def states(self) -> SegmentStates:
        """States of recurrent layers: a segment continues its parent."""
        return SegmentStates(self.segments, self.device)

    def choose_kernel(self, q: Tensor, v: Tensor, rule: ScoreRule) -> KernelChoice:
        """Whether models/tree_attention.py computes it."""
        unsupported = {
            "queries of some of the segments": self.rows != self.total,
            "samples that share nothing, for which torch has a faster one": not self._is_tree
            and rule.softcap is None
            and rule.sinks is None
            and rule.sees_all(max((s.length for s in self.segments), default=0)),
            "slopes": rule.slopes is not None,
            "keys that are chosen": rule.chosen is not None,
            "images whose tokens see each other": rule.images is not None,
            f"heads of more than {WIDEST} numbers": max(q.shape[2], v.shape[2]) > WIDEST,
            f"{q.dtype} beside {v.dtype}": q.dtype != v.dtype,
            "float32, which no tensor core multiplies": q.dtype not in HALVES,
        }
        return choose_kernel(q.device.type, *(what for what, present in unsupported.items() if present))

    def takes_loops(self, dtype: torch.dtype) -> bool:
        """Whether the loops of models/tree_loops.py attend here, of what they compute (`takes_tree`)."""
        return self._is_plain and multiplies_in_vectors(dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        if self.takes_loops(q.dtype) and not q.shape[2] % UNIT and takes_tree(q, k, v, rule) and has_kernels(q, k, v):
            return attend_tree(q, k, v, self.table, rule, library())
        if self.choose_kernel(q, v, rule).takes_kernel:
            from rondel.models.tree_attention import tree_attention

            return tree_attention(q, k, v, self.tree, rule)
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

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        return self.attend(layer, q, *up.expand(c, r), rule)

    def attend_compressed(
        self, layer: int, q: Tensor, kv: Tensor, entries: CompressedEntries | None, rule: ScoreRule
    ) -> Tensor:
        heads, size = q.shape[1:]
        queries, keys = self._query_rows(heads)(q), self._context_rows(1)(kv[:, None])
        ends = [None if entries is None else call.window_ends(entries.rate) for call in self.calls]
        older = None if entries is None else self._entry_rows(entries.rate)(entries.rows[:, None])
        parts, a, b, c = [], 0, 0, 0
        for call, last in zip(self.calls, ends, strict=True):
            rows, width = call.queries.shape
            held, count = call.keys.shape[1], 0 if last is None else last.places.shape[1]
            q_end, k_end, e_end = a + rows * heads * width, b + rows * held, c + rows * count
            out = call.attend_compressed(
                queries[a:q_end].view(rows, heads, width, size),
                keys[b:k_end].view(rows, 1, held, size),
                None if older is None or last is None else older[c:e_end].view(rows, 1, count, size),
                last,
                rule,
            )
            parts.append(out.reshape(-1, size))
            a, b, c = q_end, k_end, e_end
        return self._collect_rows(heads)(torch.cat(parts)).view(-1, heads, size)

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> Tensor:
        """Positions [T,k] of the keys that an indexer chooses."""
        return choose_in_pack(self.calls, tokens)

    @property
    def segment_contexts(self) -> list[tuple[PackedSegment, Tensor]]:
        """Each segment whose queries are here, with the places of its ancestors' tokens and its own."""
        return [
            (s, torch.from_numpy(np.concatenate([self._above[i], _segment_positions(s)])))
            for i in self._own
            for s in [self.segments[i]]
        ]

    def _query_rows(self, heads: int) -> SelectRows:
        """Tokens to the calls' queries: rows of [T*heads, D]."""
        return self._cached_rows(
            "queries", heads, lambda: self._rows_of("queries", "real", heads, self.rows, self.first)
        )

    def _context_rows(self, heads: int) -> SelectRows:
        """Tokens to the calls' keys."""
        return self._cached_rows("keys", heads, lambda: self._rows_of("keys", "used", heads, self.total, 0))

    def _entry_rows(self, rate: int) -> SelectRows:
        """Tokens to the compressed entries of the calls' contexts."""

        def build_rows() -> SelectRows:
            ends = [call.window_ends(rate) for call in self.calls]
            places, used = (torch.cat([getattr(e, side).flatten() for e in ends]) for side in ("places", "used"))
            return SelectRows(places, used >= 0, self.total, self.device)

        return self._cached_rows("entries", rate, build_rows)

    def _collect_rows(self, heads: int) -> SelectRows:
        """The calls' queries back to tokens."""

        def build_rows() -> SelectRows:
            spread = self._query_rows(heads)
            place = torch.empty(self.rows * heads, dtype=torch.int64)
            place[spread.taken] = spread.users
            return SelectRows(place, torch.ones(len(place), dtype=torch.bool), spread.length, self.device)

        return self._cached_rows("back", heads, build_rows)

    def _rows_of(self, places: str, real: str, heads: int, rows: int, first: int) -> SelectRows:
        index, counts = (
            torch.cat([_by_head(getattr(call, name), heads) for call in self.calls]) for name in (places, real)
        )
        return SelectRows(index - first * heads, counts >= 0, rows * heads, self.device)

    def _cached_rows(self, what: str, heads: int, make: Callable[[], SelectRows]) -> SelectRows:
        if (what, heads) not in self._made:
            self._made[what, heads] = make()
        return self._made[what, heads]


def _segment_positions(segment: PackedSegment) -> np.ndarray:
    return np.arange(segment.start, segment.start + segment.length)


def _by_head(places: Tensor, heads: int) -> Tensor:
    """[S,N] places of tokens, -1 for none -> [S*heads*N] rows of [T*heads, D]."""
    rows = places[:, None, :] * heads + torch.arange(heads)[:, None]
    return torch.where(places[:, None, :] < 0, -1, rows).flatten()


class SelectRows:
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

    def sum_users(self, grad: Tensor) -> Tensor:
        """Gradients of the taken rows [N,D] -> of all rows [T·H,D]."""
        out = grad.new_empty(self.total, grad.shape[1])
        for n, rows, users in self.adjoint:
            if n == 0:
                out.index_fill_(0, rows, 0)
            else:
                gathered = grad.index_select(0, users)
                out.index_copy_(0, rows, gathered if n == 1 else gathered.view(len(rows), n, -1).sum(1))
        return out


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rows: SelectRows):
        ctx.rows = rows
        return x.index_select(0, rows.index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.rows.sum_users(grad), None


SCORES = 1 << 20  # scores of one head that a call may have before more segments join it


class Sized(Protocol):
    """What has a length: a segment, or a part of one."""

    @property
    def length(self) -> int: ...


def group_segments(
    segments: Sequence[Sized], above: Sequence[np.ndarray] | Mapping[int, np.ndarray], own: Sequence[int]
) -> list[list[int]]:
    """Which of the `own` segments go into one call: those of similar length under contexts of
    similar length, so that little is padded.
    """
    ordered = sorted(own, key=lambda i: (len(above[i]).bit_length(), -segments[i].length))
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
    asked    [S,L]    the queries' places among those that are here: `first` is the place of the first one
    """

    def __init__(
        self, segments: list[PackedSegment], above: list[np.ndarray], device: torch.device | str, first: int = 0
    ) -> None:
        length = torch.tensor([s.length for s in segments])[:, None]
        depth = torch.tensor([len(places) for places in above])[:, None]
        start = torch.tensor([s.start for s in segments])[:, None]
        own, over = torch.arange(int(length.max())), torch.arange(int(depth.max()))
        context = torch.full((len(segments), len(over)), -1)
        for row, places in enumerate(above):
            context[row, : len(places)] = torch.from_numpy(places)
        self.queries = start + torch.minimum(own, length - 1)
        self.asked = self.queries - first
        self.real = torch.where(own < length, self.queries, -1)
        self.keys = torch.cat([context.clamp_min(0), self.queries], 1)
        self.used = torch.cat([context, self.real], 1)
        self.causal = all(s.causal for s in segments)
        at = depth + own
        if not self.causal:  # a query that sees its whole segment looks back from the end of it
            at = torch.where(torch.tensor([s.causal for s in segments])[:, None], at, depth + length - 1)
        self.at = at.to(device)  # [S,L] position of each query in its own sequence, as far as it sees
        # [S,P+L] of each key, -1 for none
        self.of = torch.cat([torch.where(over < depth, over, -1), depth + own], 1).to(device)
        if self.causal and bool((depth == depth[0]).all()):  # one mask for all rows
            self.at, self.of = self.at[:1], self.of[:1]
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}
        self._ends: dict[int, WindowEnds] = {}

    def window_ends(self, rate: int) -> WindowEnds:
        """The keys at which windows of `rate` positions end."""
        if rate not in self._ends:
            self._ends[rate] = WindowEnds.from_keys(self.keys, self.used, self.of, rate)
        return self._ends[rate]

    def distance(self) -> Tensor:
        """[S or 1, 1, L, P+L] from a query back to a key."""
        return (self.at[:, :, None] - self.of[:, None])[:, None]

    def attention_mask(self, rule: ScoreRule) -> Tensor:
        """[S or 1, 1, L, P+L]: True where a query may look. A padded own key lies after every real query."""
        if rule.reach not in self._masks:
            seen = rule.visible(self.at[:, None, :, None], self.distance())
            self._masks[rule.reach] = seen & (self.of >= 0)[:, None, None]
        return self._masks[rule.reach]

    def same_image(self, images: Tensor, asked: slice = slice(None)) -> Tensor:
        """[S, L, P+L]: True where a key lies behind a query in the same image; `asked`: for these queries alone."""
        real = torch.where(self.used < 0, -1, images.cpu()[self.keys]).to(images.device)
        own = images[self.queries[:, asked].to(images.device)][:, :, None]
        behind = self.at[:, asked, None] < self.of[:, None]
        return (own >= 0) & (own == real[:, None]) & behind

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        causal = self.causal and self.keys.shape[1] == self.queries.shape[1] and rule.sees_all(self.queries.shape[1])
        per_head = rule.softcap is not None or rule.slopes is not None
        row = len(q) * self.keys.shape[1] * (q.shape[1] if per_head else 1)
        if row * q.shape[2] > LONG and (per_head or rule.sinks is not None or not causal):
            return self._attend_blocks(q, k, v, rule, max(1, LONG // row))
        distance = None if rule.slopes is None else self.distance()
        mask = None if causal else self.attention_mask(rule)
        if mask is not None and rule.chosen is not None:
            mask = mask & is_chosen(rule.chosen[self.asked.to(q.device)], self.of)[:, None]
        if mask is not None and rule.images is not None:
            mask = mask | self.same_image(rule.images)[:, None]
        if is_short(q, k) and takes_mask(q, k, v, rule):
            a, b, c = (x.float() if is_widened(q.dtype) else x for x in (q, k, v))
            seen = self.attention_mask(rule) if mask is None else mask
            return attend_masked(a, b, c, seen, rule.scale).to(q.dtype)
        return sdpa(q, k, v, rule, mask=mask, distance=distance, widened=is_widened(q.dtype), train=True)

    def _attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, size: int) -> Tensor:
        """The same, `size` queries at a time, each block under a mask of its own over the keys up to its last query.

        Kernels keep their mask for the backward pass. Here a block is computed again in it, so that what is kept grows
        with the length of a sample and not with its square.
        """
        widened = is_widened(q.dtype)

        def attend_block(first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at, of = self.at[:, first : first + q.shape[2]], self.of[:, : k.shape[2]]
            distance = (at[:, :, None] - of[:, None])[:, None]
            mask = rule.visible(at[:, None, :, None], distance) & (of >= 0)[:, None, None]
            if rule.chosen is not None:
                places = self.asked[:, first : first + q.shape[2]].to(q.device)
                mask = mask & is_chosen(rule.chosen[places], of)[:, None]
            if rule.images is not None:
                mask = mask | self.same_image(rule.images, slice(first, first + q.shape[2]))[:, None]
            return sdpa(q, k, v, rule, mask=mask, distance=distance, widened=widened, train=True)

        if rule.images is not None or not self.causal:  # an image, or a segment, may end behind the block
            return _run_blocks(attend_block, size, q, (), k, v)
        return _run_blocks(attend_block, size, q, (k, v))

    def attend_compressed(
        self, q: Tensor, kv: Tensor, entries: Tensor | None, ends: WindowEnds | None, rule: ScoreRule
    ) -> Tensor:
        """q [S,H,L,D] over keys that are values [S,1,P+L,D] and entries at `ends` [S,1,N,D] -> [S,H,L,D]."""
        length, widened = q.shape[2], is_widened(q.dtype)
        pairs = len(q) * (kv.shape[2] + (0 if entries is None else entries.shape[2]))

        def attend_block(first: int, q: Tensor, kv: Tensor, entries: Tensor | None = None) -> Tensor:
            at, of = self.at[:, first : first + q.shape[2]], self.of[:, : kv.shape[2]]
            mask = rule.visible(at[:, :, None], at[:, :, None] - of[:, None]) & (of >= 0)[:, None]
            if entries is not None and ends is not None:  # and be it none: ranks that share a row need one graph
                over = (ends.of[:, None] >= 0) & (ends.of[:, None] <= at[:, :, None])
                if rule.chosen is not None and entries.shape[2]:
                    asked = self.asked[:, first : first + q.shape[2]].to(q.device)
                    over = over & is_chosen(rule.chosen[asked], ends.of)
                kv = torch.cat([kv, entries], 2)
                mask = torch.cat([mask.expand(len(over), -1, -1), over], 2)
            return sdpa(q, kv, kv, rule, mask=mask[:, None], widened=widened, train=True)

        older = () if entries is None else (entries,)
        if pairs * length <= LONG:
            return attend_block(0, q, kv, *older)
        return _run_blocks(attend_block, max(1, LONG // pairs), q, (kv,), *older)


def _run_blocks(
    attend_block: Callable[..., Tensor], size: int, q: Tensor, keys: Sequence[Tensor], *whole: Tensor
) -> Tensor:
    """attend_block(first, q, *keys, *whole) of `size` queries at a time, with the keys up to the last of them."""
    blocks, length = [], q.shape[2]
    context = keys[0].shape[2] - length if keys else 0
    for first in range(0, length, size):
        last = min(first + size, length)
        rows = q[:, :, first:last], *(x[:, :, : context + last] for x in keys), *whole
        if torch.is_grad_enabled():
            blocks.append(checkpoint(attend_block, first, *rows, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(attend_block(first, *rows))
    return torch.cat(blocks, 2)
