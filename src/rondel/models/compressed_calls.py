"""Attention over recent tokens and compressed entries, for a packed call, a chunk of a prompt, and rows that decode.

Keys are values, one for all heads. An entry stands with the last token of its window, so it is visible from there on.

S segments or B rows · H heads · L queries · C keys · N entries · D size of a head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rondel.models.dense_attention import sdpa
from rondel.models.key_choice import ALL, is_chosen
from rondel.models.processor import is_widened
from rondel.models.score_rule import ScoreRule

if TYPE_CHECKING:
    from rondel.models.packed_layout import AttentionCall
    from rondel.models.paged_layout import DecodeBatch, PrefillChunk

LONG = 1 << 22  # pairs of a query and a key in one mask of packed training


@dataclass(frozen=True, slots=True, eq=False)
class WindowEnds:
    """Keys of a call at which windows end: `places` of the tokens, `used` the same with -1 for padding [S,N], and their
    positions `of` [S or 1, N], -1 for padding.
    """

    places: Tensor
    used: Tensor
    of: Tensor

    @classmethod
    def from_keys(cls, places: Tensor, used: Tensor, of: Tensor, rate: int) -> WindowEnds:
        """Of all keys [S,C] at positions of [S or 1, C]."""
        if rate == 1:
            return cls(places, used, of)
        at = of.cpu()
        is_end = (at >= 0) & ((at + 1) % rate == 0)
        columns = (~is_end).to(torch.int8).argsort(dim=1, stable=True)[:, : int(is_end.sum(1).max())]
        real, every = is_end.gather(1, columns), columns.expand(len(places), -1)
        return cls(
            places.gather(1, every),
            used.gather(1, every).masked_fill(~real, -1),
            at.gather(1, columns).masked_fill(~real, -1).to(of.device),
        )


def attend_compressed_call(
    call: AttentionCall, q: Tensor, kv: Tensor, entries: Tensor | None, ends: WindowEnds | None, rule: ScoreRule
) -> Tensor:
    """q [S,H,L,D], kv [S,1,C,D], entries [S,1,N,D] -> [S,H,L,D]. As in models/packed_layout.py, long calls are computed
    in blocks of queries, again in the backward pass.
    """
    context, length = kv.shape[2] - q.shape[2], q.shape[2]
    pairs = len(q) * (kv.shape[2] + (0 if entries is None else entries.shape[2]))
    size = length if pairs * length <= LONG else max(1, LONG // pairs)

    def attend_block(first: int, q: Tensor, kv: Tensor, entries: Tensor | None) -> Tensor:
        at, of = call.at[:, first : first + q.shape[2]], call.of[:, : kv.shape[2]]
        mask = rule.visible(at[:, :, None], at[:, :, None] - of[:, None]) & (of >= 0)[:, None]
        if entries is not None and ends is not None and entries.shape[2]:
            over = (ends.of[:, None] >= 0) & (ends.of[:, None] <= at[:, :, None])
            if rule.chosen is not None:
                asked = call.asked[:, first : first + q.shape[2]].to(q.device)
                over = over & is_chosen(rule.chosen[asked], ends.of)
            kv = torch.cat([kv, entries], 2)
            mask = torch.cat([mask.expand(len(over), -1, -1), over], 2)
        return sdpa(q, kv, kv, rule, mask=mask[:, None], widened=is_widened(q.dtype), train=True)

    if size == length:
        return attend_block(0, q, kv, entries)
    blocks = []
    for first in range(0, length, size):
        last = min(first + size, length)
        rows = q[:, :, first:last], kv[:, :, : context + last], entries
        if torch.is_grad_enabled():
            blocks.append(checkpoint(attend_block, first, *rows, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(attend_block(first, *rows))
    return torch.cat(blocks, 2)


def attend_compressed_chunk(
    chunk: PrefillChunk, q: Tensor, tokens: Tensor, entries: Tensor | None, rate: int, rule: ScoreRule
) -> Tensor:
    """q [T,H,D] of the step, pools [1,pages,D] of tokens and entries -> [length,H,D]."""
    assert rule.window is not None
    new, context = chunk.length, len(chunk.context)
    first = max(0, context - new - rule.window + 1)
    positions = torch.arange(context, device=q.device)
    at, of = positions[context - new :, None], positions[first:]
    kv, mask = tokens[:, chunk.context[first:]], rule.visible(at, at - of)
    if entries is not None and context >= rate:
        ends = positions[rate - 1 :: rate]
        over = ends <= at
        if rule.chosen is not None:
            over = over & is_chosen(rule.chosen[None, chunk.start : chunk.start + new], ends[None])[0]
        kv = torch.cat([kv, chunk.window_ends(rate).read(entries)], 1)
        mask = torch.cat([mask, over], 1)
    by_head = q[chunk.start : chunk.start + new].transpose(0, 1)[None]
    out = sdpa(by_head, kv[None], kv[None], rule, mask=mask[None, None], widened=is_widened(q.dtype))
    return out[0].transpose(0, 1)


def attend_compressed_decode(
    batch: DecodeBatch, q: Tensor, tokens: Tensor, entries: Tensor | None, rate: int, rule: ScoreRule
) -> Tensor:
    """The last rows of q [T,H,D], pools [1,pages,D] -> [B,H,D]."""
    assert rule.window is not None
    rows = len(batch.own)
    slots, of = batch.recent(rule.window)
    kv, seen = slots.read(tokens), of != ALL  # [B,C,D], [B,C]
    if entries is not None:
        slots, ends = batch.window_ends(rate)
        if ends.shape[1]:
            over = ends != ALL
            if rule.chosen is not None:
                over = over & is_chosen(rule.chosen[-rows:, None], ends)[:, 0]
            kv, seen = torch.cat([kv, slots.read(entries)], 1), torch.cat([seen, over], 1)
    scores = torch.bmm(q[len(q) - rows :], kv.transpose(1, 2)).float() * rule.scale  # [B,H,C+N]
    weights = rule.softmax(scores.masked_fill_(~seen[:, None], float("-inf")), 1, -1, 1)
    return torch.bmm(weights.to(kv.dtype), kv)
