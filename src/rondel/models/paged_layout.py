"""Attention in serving: the new tokens of an engine's step over the cached keys and values of their requests.

T tokens · H query heads · K key/value heads · D head size · C keys of one context
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.cache_pools import CachePool, PoolSlots, StepCache, read_kv
from rondel.models.cpu_kernels import DecodeContexts, attend_decode, takes_pools
from rondel.models.dense_attention import ScoreRule, sdpa
from rondel.models.key_choice import ALL, IndexedTokens, choose_over_pages, is_chosen
from rondel.models.processor import is_widened

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.compressed_entries import CompressedEntries


@dataclass(slots=True)
class PrefillChunk:
    """New tokens [start, start+length) of the step that belong to one request, and the slots of its whole context."""

    start: int
    length: int
    context: Tensor  # [C] slots, the new tokens' own at the end
    slots: PoolSlots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = PoolSlots(self.context[None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, *, dense: bool = False) -> Tensor:
        """q [length,H,D] over the context's keys and values [1,K,C,D] -> [length,H,D]."""
        new, context = self.length, len(self.context)
        mask = distance = None
        if new < context or not rule.sees_all(context) or rule.slopes is not None:
            at = torch.arange(context - new, context, device=q.device)[:, None]
            of = torch.arange(context, device=q.device)
            distance = at - of
            mask = rule.visible(at, distance)
            if rule.chosen is not None:
                mask = mask & is_chosen(rule.chosen[None, self.start : self.start + new], of[None])[0]
            if rule.images is not None:  # an image is fed whole, so what lies behind a token is fed, too
                own = rule.images[self.start : self.start + new]
                same = (own[:, None] == own) & (own[:, None] >= 0) & (distance[:, context - new :] < 0)
                mask = mask | F.pad(same, (context - new, 0))
        by_head, widened = q.transpose(0, 1)[None], is_widened(q.dtype)
        out = sdpa(by_head, k, v, rule, mask=mask, distance=distance, widened=widened, dense=dense)
        return out[0].transpose(0, 1)

    def window_ends(self, rate: int) -> PoolSlots:
        """Slots of the tokens at which windows of `rate` positions end."""
        return self.slots if rate == 1 else PoolSlots(self.context[None, rate - 1 :: rate])

    def attend_latents(self, q: Tensor, pool: Tensor, up: LatentProjection, rule: ScoreRule) -> Tensor:
        """q [length,H,N+E] over the context's latents in a pool [1,pages,R+E] -> [length,H,V]."""
        latents = self.slots.read(pool)
        if up.expansion_pays(self.length):
            k, v = (x.transpose(0, 1)[None] for x in up.expand(latents[0, :, : up.rank], latents[0, :, up.rank :]))
            return self.attend(q, k, v, rule)
        shared = latents[None]
        out = self.attend(up.absorb_queries(q), shared, shared[..., : up.rank], rule, dense=True)
        return up.project_values(out)

    def attend_compressed(
        self, q: Tensor, tokens: Tensor, entries: Tensor | None, rate: int, rule: ScoreRule
    ) -> Tensor:
        """q [length,H,D] over the recent tokens of a pool [1,pages,D] whose keys are values, and the entries of
        another, which lie with the last token of every `rate` (models/compressed_attention.py) -> [length,H,D].
        """
        new, context, window = self.length, len(self.context), rule.window or len(self.context)
        first = max(0, context - new - window + 1)
        positions = torch.arange(context, device=q.device)
        at, of = positions[context - new :, None], positions[first:]
        kv, mask = tokens[:, self.context[first:]], rule.visible(at, at - of)
        if entries is not None and context >= rate:
            ends = positions[rate - 1 :: rate]
            over = ends <= at
            if rule.chosen is not None:
                over = over & is_chosen(rule.chosen[None, self.start : self.start + new], ends[None])[0]
            kv = torch.cat([kv, self.window_ends(rate).read(entries)], 1)
            mask = torch.cat([mask, over], 1)
        by_head = q.transpose(0, 1)[None]
        out = sdpa(by_head, kv[None], kv[None], rule, mask=mask[None, None], widened=is_widened(q.dtype))
        return out[0].transpose(0, 1)


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
    spans: dict[tuple[str, int], tuple[PoolSlots, Tensor]] = field(default_factory=dict)
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
        if takes_pools(q, keys, values, rule):
            members = 1 if self.grid is None else self.grid.shape[1]
            contexts = DecodeContexts(self.own, self.lengths, self.prefix, self.shared, self.place, members)
            return attend_decode(q, keys, values, contexts, rule)
        folded = q.view(rows, heads, -1, q.shape[-1]).transpose(0, 1).flatten(0, 1)  # [K*B,R,D]
        repeats = folded.shape[1]
        k, v = read_kv(self.near, keys, values)
        scores = torch.bmm(folded, k.transpose(1, 2))  # [K*B,R,C]
        if self.above is not None:
            above_k, above_v = read_kv(self.above, keys, values)
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

    def attend_compressed(
        self, q: Tensor, tokens: Tensor, entries: Tensor | None, rate: int, rule: ScoreRule
    ) -> Tensor:
        """q [B,H,D] over pools [1,pages,D], as `PrefillChunk.attend_compressed` -> [B,H,D]."""
        slots, of = self.recent(rule.window or self._slots_by_position().shape[1])
        kv, seen = slots.read(tokens), of != ALL  # [B,C,D], [B,C]
        if entries is not None and (ends := self.window_ends(rate))[1].shape[1]:
            over = ends[1] != ALL
            if rule.chosen is not None:
                over = over & is_chosen(rule.chosen[-len(q) :, None], ends[1])[:, 0]
            kv, seen = torch.cat([kv, ends[0].read(entries)], 1), torch.cat([seen, over], 1)
        scores = torch.bmm(q, kv.transpose(1, 2)).float().mul_(rule.scale)  # [B,H,C+N]
        weights = rule.softmax(scores.masked_fill_(~seen[:, None], float("-inf")), 1, -1, 1)
        return torch.bmm(weights.to(kv.dtype), kv)

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

    def last_position(self) -> Tensor:
        """[B,1] of the new tokens."""
        return self.lengths[:, None] - 1 + (0 if self.prefix is None else self._shared_length())

    def window_ends(self, rate: int) -> tuple[PoolSlots, Tensor]:
        """Slots [B,N] of the tokens at which windows of `rate` positions end, and these positions, ALL for padding."""
        if ("ends", rate) not in self.spans:
            slots = self._slots_by_position()[:, rate - 1 :: rate]
            at = torch.arange(slots.shape[1], device=slots.device) * rate + rate - 1
            self.spans["ends", rate] = PoolSlots(slots), torch.where(at <= self.last_position(), at, ALL)
        return self.spans["ends", rate]

    def recent(self, window: int) -> tuple[PoolSlots, Tensor]:
        """Slots [B,N] of the last `window` tokens, and their positions, ALL for padding."""
        if ("recent", window) not in self.spans:
            slots = self._slots_by_position()
            at = self.last_position() - torch.arange(min(window, slots.shape[1]), device=slots.device)
            self.spans["recent", window] = PoolSlots(slots.gather(1, at.clamp_min(0))), at.clamp_min(ALL)
        return self.spans["recent", window]

    def whole_contexts(self) -> tuple[Tensor, Tensor]:
        """Slots [B,P+C] of each row's context in order, padded with slot 0, and how many are real [B]."""
        slots = self.own if self.prefix is None else self._slots_by_position()
        return slots, self.last_position()[:, 0] + 1

    def _slots_by_position(self) -> Tensor:
        """[B,P+C] slots of each row's whole context, in order; slot 0 behind it."""
        slots = self.own
        if self.prefix is not None:
            assert self.place is not None and self.grid is not None
            slots = torch.cat([self.prefix[self.place // self.grid.shape[1]], self.own], 1)
        at, width = self.positions(), slots.shape[1]
        table = slots.new_zeros(len(slots), width + 1)
        return table.scatter_(1, at.masked_fill(at == ALL, width), slots)[:, :width]

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


class PagedLayout(StepCache):
    """One engine step: prefill chunks first, then one token for each decoding request."""

    def __init__(
        self,
        keys: CachePool,
        values: CachePool,
        write: Tensor,
        chunks: list[PrefillChunk],
        decoding: DecodeBatch | None = None,
    ) -> None:
        super().__init__(keys, values, write)
        self.chunks, self.decoding = chunks, decoding

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        keys, values = self.store_kv(layer, k, v)
        parts = []
        for chunk in self.chunks:
            k, v = (chunk.slots.read(pool)[None] for pool in (keys, values))
            parts.append(chunk.attend(q[chunk.start : chunk.start + chunk.length], k, v, rule))
        if self.decoding is not None:
            last = q[len(q) - len(self.decoding.own) :]
            parts.append(self.decoding.attend(last, keys, values, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        pool, parts = self.store_latents(layer, c, r), []
        for chunk in self.chunks:
            own = up.of_rows(chunk.start, chunk.length)
            parts.append(chunk.attend_latents(q[chunk.start : chunk.start + chunk.length], pool, own, rule))
        if self.decoding is not None:
            first = len(q) - len(self.decoding.own)
            own = up.of_rows(first, len(self.decoding.own))
            out = self.decoding.attend(own.absorb_queries(q[first:]), pool, pool[..., : up.rank], rule)
            parts.append(own.project_values(out))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_compressed(
        self, layer: int, q: Tensor, kv: Tensor, entries: CompressedEntries | None, rule: ScoreRule
    ) -> Tensor:
        """The keys are the values, so the layer's pool of values holds the entries: that of a window with its last
        token.
        """
        tokens = self.keys.layer_pool(layer, kv[:, None])
        self._into.write(tokens, kv[:, None])
        older = None
        if entries is not None:
            older = self.values.layer_pool(layer, entries.rows[:, None])
            self._into.write(older, entries.rows[:, None])
        rate = 0 if entries is None else entries.rate
        parts = [
            chunk.attend_compressed(q[chunk.start : chunk.start + chunk.length], tokens, older, rate, rule)
            for chunk in self.chunks
        ]
        if self.decoding is not None:
            last = q[len(q) - len(self.decoding.own) :]
            parts.append(self.decoding.attend_compressed(last, tokens, older, rate, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> Tensor:
        """Positions [T,k] of the keys that an indexer chooses.
        Its own keys are cached as those of a layer below zero."""
        pool = self.keys.layer_pool(-1 - layer, tokens.k[:, None])
        self._into.write(pool, tokens.k[:, None])
        return choose_over_pages(self.chunks, self.decoding, pool, tokens)
