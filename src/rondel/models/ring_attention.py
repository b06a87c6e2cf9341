"""Attention of a row over several ranks whose keys and values go round a ring (arXiv:2310.01889), block by block.

    step s of rank i    its queries over the block of rank i - s, while that of rank i - s - 1 comes from rank i - 1
    backward            the same once more; the gradient of a block travels with it, and from its last rank home

Blocks are merged by the logarithm of their sums of exponentials, in fp32:

    lse = log sum_b exp(lse_b)        out = sum_b exp(lse_b - lse) out_b        (arXiv:2205.14135)

A rank holds at most two blocks of others, the one it computes with and the one that comes, and their gradients in fp32.
A block goes no farther than somebody sees it (core/ring_blocks.py). Scores are written out, some queries at a time.

t tokens of a rank · H query heads · K key/value heads · D size of a key · E size of a value
S segments of one call · L the longest · C most keys of one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rondel.core.ring_blocks import Reach, RingPiece, ring_hops, ring_pieces, seen_pieces
from rondel.core.row_split import RowDealing, RowSegment
from rondel.models.collectives import RankGroup
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import SelectRows, group_segments
from rondel.models.processor import is_widened

SCORES = 1 << 19  # that are written out at once: 2 MB in fp32, which stay in the cache of a core
GPU_SCORES = 1 << 26


class BlockCall:
    """Queries of some of a rank's segments over what they see of one block.

    queries  [S,L]  places of the queries among the rank's rows; a padded one repeats the last
    at       [S,L]  positions of the queries, -1 for padding
    of       [S,C]  positions of the keys, -1 for padding
    span     where the keys lie in the block, if they are of one segment and lie together
    """

    def __init__(
        self,
        pieces: Sequence[RingPiece],
        keys: Sequence[np.ndarray],
        positions: Sequence[np.ndarray],
        rows: int,
        device: torch.device | str,
    ) -> None:
        length = np.array([[p.length] for p in pieces])
        own = np.arange(length.max())[None]
        start, depth = (np.array([[getattr(p, name)] for p in pieces]) for name in ("start", "depth"))
        queries, at = start + np.minimum(own, length - 1), np.where(own < length, depth + own, -1)
        self.first, self.positions = pieces[0], positions[0]
        self.queries, self.at = torch.from_numpy(queries).to(device), torch.from_numpy(at).to(device)
        self.of = torch.from_numpy(_pad_rows(positions, -1)).to(device)
        places = keys[0]
        self.span: slice | None = None
        if len(pieces) == 1 and places[-1] - places[0] == len(places) - 1:
            self.span = slice(int(places[0]), int(places[-1]) + 1)
        else:
            index, used = torch.from_numpy(_pad_rows(keys, 0)), self.of.cpu() >= 0
            self.rows = SelectRows(index.flatten(), used.flatten(), rows, device)

    def take_keys(self, x: Tensor) -> Tensor:
        """[t, ...] -> [S,C, ...]."""
        if self.span is not None:
            return x[self.span][None]
        return x.index_select(0, self.rows.index).view(*self.of.shape, *x.shape[1:])

    def gradient_rows(self, total: Tensor) -> Tensor:
        """Where gradients of the taken keys [S,C,K,n] are summed: in those of the block [t,K,n],
        if they lie together."""
        if self.span is not None:
            return total[self.span][None]
        return total.new_zeros(*self.of.shape, *total.shape[1:])

    def add_gradient(self, total: Tensor, grad: Tensor) -> None:
        """What was summed there to those of the block, in a fixed order."""
        if self.span is None:
            total += self.rows.sum_users(grad.flatten(0, 1).flatten(1)).view_as(total)

    def parts(self, heads: int, reach: Reach) -> Iterator[tuple[slice, slice]]:
        """Which queries of each segment, and which of its keys, are computed at once: of a single one those alone that
        its queries see.
        """
        (segments, length), held = self.queries.shape, self.of.shape[1]
        size = max(1, (GPU_SCORES if self.of.is_cuda else SCORES) // (segments * heads * held))
        for first in range(0, length, size):
            last, keys = min(first + size, length), slice(0, held)
            if segments == 1:
                ends = self.first.lowest_seen(reach, first), self.first.depth + last
                keys = slice(*(int(n) for n in np.searchsorted(self.positions, ends)))
            if keys.start < keys.stop:
                yield slice(first, last), keys


def _pad_rows(rows: Sequence[np.ndarray], fill: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows))), fill)
    for padded, row in zip(out, rows):
        padded[: len(row)] = row
    return out


@dataclass(frozen=True, slots=True)
class RingRound:
    """How far each rank's block travels, and what this rank computes of each."""

    hops: list[int]
    calls: list[list[BlockCall]]


class RingRow:
    """One packed row over the ranks of a ring, of which this one has the run and the segments of its dealing."""

    def __init__(
        self, segments: Sequence[RowSegment], dealing: RowDealing, ranks: RankGroup, device: torch.device | str
    ) -> None:
        self.pieces, self.lengths = ring_pieces(segments, dealing), dealing.lengths
        self.ranks, self.device = ranks, device
        self.own = [i for i, piece in enumerate(self.pieces) if piece.rank == ranks.index]
        self.rows = sum(self.pieces[i].length for i in self.own)
        self._rounds: dict[Reach, RingRound] = {}

    @property
    def run(self) -> int:
        """How many of this rank's rows, the first ones, are its block."""
        return self.lengths[self.ranks.index]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [t,H,D], k [t,K,D], v [t,K,E] of this rank -> [t,H,E]; all ranks call it."""
        assert rule.chosen is None and rule.images is None, "refused as the model is loaded"
        out: Tensor = _RingAttention.apply(q, k, v, rule.sinks, self, replace(rule, sinks=None))
        return out

    def round_of(self, reach: Reach) -> RingRound:
        if reach not in self._rounds:
            hops = ring_hops(self.pieces, self.ranks.size, reach)
            calls = [self._block_calls(source, reach) for source in range(self.ranks.size)]
            self._rounds[reach] = RingRound(hops, calls)
        return self._rounds[reach]

    def _block_calls(self, source: int, reach: Reach) -> list[BlockCall]:
        places: dict[int, np.ndarray] = {}
        positions: dict[int, np.ndarray] = {}
        for i in self.own:
            seen = [i, *seen_pieces(self.pieces, i, reach)]
            found = [p for p in (self.pieces[n] for n in reversed(seen)) if p.rank == source]
            if found:
                at = np.concatenate([np.arange(p.depth, p.depth + p.length) for p in found])
                keys, kept = (
                    np.concatenate([np.arange(p.start, p.start + p.length) for p in found]),
                    at >= self.pieces[i].lowest_seen(reach),
                )
                places[i], positions[i] = keys[kept], at[kept]
        rows = self.rows if source == self.ranks.index else self.lengths[source]
        return [
            BlockCall(
                [self.pieces[i] for i in group], [places[i] for i in group], [positions[i] for i in group], rows,
                self.device,
            )
            for group in group_segments(self.pieces, positions, list(places))
        ]  # fmt: skip


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, row: RingRow, rule: ScoreRule):
        (rows, heads), size = q.shape[:2], v.shape[2]
        out = q.new_zeros(rows, heads, size, dtype=torch.float32)
        lse = q.new_full((rows, heads), float("-inf"), dtype=torch.float32)
        each = row.round_of(rule.reach)

        def use_block(source: int, k: Tensor, v: Tensor) -> None:
            for call in each.calls[source]:
                _merge_call(out, lse, call, q, k, v, rule)

        use_block(row.ranks.index, k, v)
        _travel(_message(k, v, row.run), (k, v), each.hops, row, use_block)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.float())
            out *= (lse - whole).exp()[..., None]
            lse = whole
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.row, ctx.rule = row, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        row, rule = ctx.row, ctx.rule
        delta = (grad.float() * out.float()).sum(-1)
        of_sinks = None if sinks is None else -((sinks.float() - lse).exp() * delta).sum(0).to(sinks.dtype)
        each, of_queries = row.round_of(rule.reach), q.new_zeros(q.shape, dtype=torch.float32)

        def use_block(source: int, k: Tensor, v: Tensor, of_keys: Tensor, of_values: Tensor) -> None:
            for call in each.calls[source]:
                _differentiate_call(of_queries, of_keys, of_values, call, (q, k, v), (grad, lse, delta), rule)

        own = [x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v)]
        use_block(row.ranks.index, k, v, *own)
        back = _travel_back(_message(k, v, row.run), (k, v), each.hops, row, use_block)
        for total, theirs in zip(own, back):
            total[: len(theirs)] += theirs
        return of_queries.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), of_sinks, None, None


# -- messages ------------------------------------------------------------------------------------

Shaped = tuple[Tensor, Tensor]  # any keys and values of as many heads and numbers


def _message(k: Tensor, v: Tensor, run: int) -> Tensor:
    """The keys of a block, then its values, in one vector."""
    return torch.cat([k[:run].flatten(), v[:run].flatten()])


def _of_message(message: Tensor, like: Shaped) -> list[Tensor]:
    """The same as [t,K,D] and [t,K,E]."""
    sizes = [x[:1].numel() for x in like]
    rows = message.numel() // sum(sizes)
    parts = message.split([rows * size for size in sizes])
    return [part.view(rows, *x.shape[1:]) for part, x in zip(parts, like)]


def _travel(
    here: Tensor, like: Shaped, hops: list[int], row: RingRow, use_block: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Give each block on to the next rank, as far as it goes; others' blocks are used as they pass by."""
    ranks, width = row.ranks, sum(x[:1].numel() for x in like)
    for step in range(max(hops) + 1):
        source, coming = (ranks.index - step) % ranks.size, (ranks.index - step - 1) % ranks.size
        goes, comes = hops[source] > step, hops[coming] > step
        after = here.new_empty(row.lengths[coming] * width if comes else 0)
        wait = ranks.shift(here if goes else here[:0], after)
        if step and hops[source] >= step:
            use_block(source, *_of_message(here, like))
        wait()
        del wait  # it holds what was sent
        here = after


def _travel_back(
    here: Tensor,
    like: Shaped,
    hops: list[int],
    row: RingRow,
    use_block: Callable[[int, Tensor, Tensor, Tensor, Tensor], None],
) -> list[Tensor]:
    """The same round; the gradient of a block follows it in fp32, each rank adds its own, and the last one sends it
    home. -> those of this rank's block.
    """
    ranks, n, i, width = row.ranks, row.ranks.size, row.ranks.index, sum(x[:1].numel() for x in like)
    own = here.numel()
    gradient = home = here.new_empty(0, dtype=torch.float32)  # of the block that is here, by the ranks before this one
    for step in range(max(hops) + 1):
        source, coming = (i - step) % n, (i - step - 1) % n
        goes, comes = hops[source] > step, hops[coming] > step
        after = here.new_empty(row.lengths[coming] * width if comes else 0)
        wait = ranks.shift(here if goes else here[:0], after)
        sent: list[tuple[Tensor, int]] = []
        if step and hops[source] >= step:
            if step == 1:
                gradient = home.new_zeros(here.shape)
            use_block(source, *_of_message(here, like), *_of_message(gradient, like))
            sent = [(gradient, i + 1 if goes else source)]
        wait()
        del wait
        here, partial, got = after, gradient.new_empty(0), list[tuple[Tensor, int]]()
        if step and comes:
            partial = gradient.new_empty(after.shape)
            got.append((partial, i - 1))
        if step and hops[i] == step:
            home = gradient.new_empty(own)
            got.append((home, i + step))
        ranks.exchange_messages(sent, got)()
        gradient = partial
    return _of_message(home, like)


# -- one call ------------------------------------------------------------------------------------


def _fold_heads(x: Tensor, shared: int) -> Tensor:
    """[S,l,H,D] -> [S,K,H/K·l,D]: the query heads of one key head become its queries."""
    return x.transpose(1, 2).reshape(len(x), shared, -1, x.shape[3])


def _unfold_heads(x: Tensor, length: int) -> Tensor:
    """[S,K,H/K·l,D] -> [S,l,H,D]."""
    return x.reshape(len(x), -1, length, x.shape[3]).transpose(1, 2)


def _products(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As products of this dtype take it."""
    return x.to(torch.float32 if x.is_cpu and is_widened(dtype) else dtype)


def _scores(
    q: Tensor, k: Tensor, call: BlockCall, at: slice, keys: slice, rule: ScoreRule
) -> tuple[Tensor, Tensor | None]:
    """q [S,K,G·l,D] over k [S,K,c,D] -> scores [S,H,l,c] in fp32, -inf where a query sees nothing, and their derivative
    by those before the softcap, if there is one.
    """
    asked, of = call.at[:, at, None], call.of[:, None, keys]
    scores = torch.matmul(q, k.transpose(-1, -2)).float().view(len(q), -1, asked.shape[1], of.shape[2]) * rule.scale
    scores, steep = rule.capped(scores), None
    if rule.softcap is not None:
        steep = 1 - (scores / rule.softcap).square()
    distance = asked - of
    seen = rule.visible(asked, distance) & (of >= 0)
    scores = rule.with_slopes(scores, distance[:, None], 1, -1, 1, 1)
    return scores.masked_fill(~seen[:, None], float("-inf")), steep


def _merge_call(out: Tensor, lse: Tensor, call: BlockCall, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> None:
    """Add what a call sees to outputs [t,H,E] and to their sums [t,H], in place."""
    taken = [_products(call.take_keys(x), q.dtype).transpose(1, 2) for x in (k, v)]
    for at, keys in call.parts(q.shape[1], rule.reach):
        places, length = call.queries[:, at], at.stop - at.start
        asked = _fold_heads(_products(q[places], q.dtype), k.shape[1])
        scores, _ = _scores(asked, taken[0][:, :, keys], call, at, keys, rule)
        top = scores.amax(-1)  # [S,H,l]
        top.masked_fill_(top == float("-inf"), 0.0)
        weights = scores.sub_(top[..., None]).exp_()
        total = weights.sum(-1)
        values = torch.matmul(weights.to(asked.dtype).view(*asked.shape[:3], -1), taken[1][:, :, keys]).float()
        real = call.at[:, at].flatten() >= 0
        rows = places.flatten()[real]
        mine = _unfold_heads(values, length).flatten(0, 1)[real]
        top, total = (x.transpose(1, 2).flatten(0, 1)[real] for x in (top, total))
        before = lse[rows]
        both = torch.logaddexp(before, top + total.log())
        some = both.masked_fill(both == float("-inf"), 0.0)
        share = torch.where(total > 0, (top - some).exp(), 0.0)
        out[rows] = out[rows] * (before - some).exp()[..., None] + mine * share[..., None]
        lse[rows] = both


def _differentiate_call(
    of_queries: Tensor,
    of_keys: Tensor,
    of_values: Tensor,
    call: BlockCall,
    inputs: tuple[Tensor, Tensor, Tensor],
    known: tuple[Tensor, Tensor, Tensor],
    rule: ScoreRule,
) -> None:
    """Add the gradients of a call to those of queries [t,H,D], keys [t,K,D] and values [t,K,E], in place.

        P_ij = exp(s_ij - lse_i)    dV_j = sum_i P_ij dO_i    dS_ij = P_ij (dO_i v_j - dO_i O_i)

    known: gradients of the outputs [t,H,E], lse [t,H], dO O [t,H]
    """
    (q, k, v), (grad, lse, delta) = inputs, known
    keys_c, values_c = (_products(call.take_keys(x), q.dtype).transpose(1, 2) for x in (k, v))
    totals = [call.gradient_rows(x) for x in (of_keys, of_values)]
    for at, keys in call.parts(q.shape[1], rule.reach):
        places, length = call.queries[:, at], at.stop - at.start
        asked, wanted = (_fold_heads(_products(x[places], q.dtype), k.shape[1]) for x in (q, grad))
        keys_l, values_l = keys_c[:, :, keys], values_c[:, :, keys]
        scores, steep = _scores(asked, keys_l, call, at, keys, rule)
        lse_l, delta_l = (x[places].transpose(1, 2)[..., None] for x in (lse, delta))
        weights = (scores - lse_l).exp_()
        change = torch.matmul(wanted, values_l.transpose(-1, -2)).float().view_as(weights)
        change = weights * (change - delta_l) * rule.scale
        change = change if steep is None else change * steep
        weights, change = (x.to(asked.dtype).view(*asked.shape[:3], -1) for x in (weights, change))
        totals[0][:, keys] += torch.matmul(change.transpose(-1, -2), asked).float().transpose(1, 2)
        totals[1][:, keys] += torch.matmul(weights.transpose(-1, -2), wanted).float().transpose(1, 2)
        real = call.at[:, at].flatten() >= 0
        mine = _unfold_heads(torch.matmul(change, keys_l).float(), length).flatten(0, 1)[real]
        of_queries[places.flatten()[real]] += mine
    for total, own in zip((of_keys, of_values), totals):
        call.add_gradient(total, own)
