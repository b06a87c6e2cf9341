"""Which keys a query attends to, where an indexer chooses them (DeepSeek Sparse Attention, arXiv:2512.02556).

    score_ts = sum_h w_th relu(q_th . k_s)          t attends to the k visible keys s of the largest score

A choice holds positions in the token's own sequence, so it means the same in a pack, over pages and in the cache of
another step. A query that sees no more than k keys chooses none and attends to all. Equal scores go to the earlier key.

T tokens · H index heads of size d · C keys · k keys chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALL = -1  # in place of a position: nothing chosen


@dataclass(frozen=True, slots=True)
class IndexedTokens:
    """What an indexer makes of the tokens of a pass: queries [T,H,d], keys [T,d], weights of heads [T,H], and k.

    rate  every so many tokens there is a key, at the last of them (models/compressed_attention.py)
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    count: int
    rate: int = 1

    def no_choice(self) -> Tensor:
        """[T, k] for tokens that see all."""
        return torch.full((len(self.q), self.count), ALL, dtype=torch.int64, device=self.q.device)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """q [B,L,H,d], k [B,C,d], weights [B,L,H] -> [B,L,C] in fp32, one head after the other."""
    keys = k.float().transpose(1, 2)
    scores = q.new_zeros(*q.shape[:2], k.shape[1], dtype=torch.float32)
    for head in range(q.shape[2]):
        scores += weights[..., head, None].float() * (q[:, :, head].float() @ keys).relu_()
    return scores


def choose_keys(q: Tensor, k: Tensor, weights: Tensor, at: Tensor, positions: Tensor, count: int) -> Tensor:
    """q [B,L,H,d] at positions `at` [B or 1, L]; k [B,C,d] at `positions` [B or 1, C],
    ALL for padding -> [B,L,count]."""
    seen = (positions[:, None] <= at[:, :, None]) & (positions[:, None] != ALL)
    scores = index_scores(q, k, weights).masked_fill_(~seen, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = positions[:, None].expand(*best.shape[:2], -1).gather(-1, best)
    return chosen.masked_fill(seen.sum(-1, keepdim=True) <= count, ALL)


def is_chosen(chosen: Tensor, positions: Tensor) -> Tensor:
    """Choices [B,L,k] and positions of keys [B or 1, C] -> True [B,L,C] where a query may look."""
    most = int(positions.max()) + 1
    marks = torch.zeros(*chosen.shape[:2], most + 1, dtype=torch.bool, device=chosen.device)
    marks.scatter_(-1, torch.where(chosen == ALL, most, chosen), True)
    found = marks.gather(-1, positions.clamp_min(0)[:, None].expand(*chosen.shape[:2], -1))
    return found | (chosen == ALL).all(-1, keepdim=True)


def choose_in_pack(calls: Sequence[Any], tokens: IndexedTokens) -> Tensor:
    """Of a packed row, call by call (models/packed_layout.py: AttentionCall) -> [T, k]."""
    out = tokens.no_choice()
    for call in calls:
        ends = call.window_ends(tokens.rate)
        if ends.places.shape[1] <= tokens.count:
            continue
        queries = call.asked.to(out.device)
        keys = tokens.k[ends.places.to(out.device)]
        chosen = choose_keys(tokens.q[queries], keys, tokens.weights[queries], call.at, ends.of, tokens.count)
        real = (call.real >= 0).to(out.device)
        out[queries[real]] = chosen[real]
    return out


def choose_over_pages(chunks: Sequence[Any], decoding: Any, pool: Tensor, tokens: IndexedTokens) -> Tensor:
    """Of an engine's step (PrefillChunk, DecodeBatch), whose index keys are in `pool` [1,pages,d] -> [T, k]."""
    out = tokens.no_choice()
    for chunk in chunks:
        if (context := len(chunk.context)) // tokens.rate > tokens.count:
            rows, positions = slice(chunk.start, chunk.start + chunk.length), torch.arange(context, device=out.device)
            out[rows] = choose_keys(
                tokens.q[None, rows],
                chunk.window_ends(tokens.rate).read(pool),
                tokens.weights[None, rows],
                positions[None, context - chunk.length :],
                positions[None, tokens.rate - 1 :: tokens.rate],
                tokens.count,
            )[0]
    if decoding is not None:
        if tokens.rate == 1:
            slots, positions = None, decoding.positions()
        else:
            slots, positions = decoding.window_ends(tokens.rate)  # none, where no context is as long as a window
        if positions.shape[1] > tokens.count:
            keys = decoding.context_keys(pool) if slots is None else slots.read(pool)
            rows = slice(len(out) - len(keys), len(out))
            at = decoding.last_position()
            out[rows] = choose_keys(
                tokens.q[rows, None], keys, tokens.weights[rows, None], at, positions, tokens.count
            )[:, 0]
    return out
