"""Aligned numerics: a token's logprob has the same bits in every batch, packing,
chunking and cache state, and in the trainer.

What must not depend on the batch is the order of every sum:

    linear layers      models/linear.py: oneDNN's rows do not depend on each other (bf16: in blocks of 64)
    norms              row by row, in torch as they are; short convolutions tap by tap
    activations        models/elementwise.py: every number is part of a whole vector
    attention          here: each query over its context from the first token on, in blocks of BLOCK
                       keys; scores and weighted values are one small product a block, blocks are
                       added in order, and blocks that
                       are only padding add zeros

The forward value is this one on both sides; the backward pass of the trainer is that of
its fast attention. It costs memory traffic: nothing is shared between queries. Whether
processor, torch build and model really give
equal bits is proven at start: `check_invariance`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.algos.tokens import select_logprobs
from rondel.core.errors import ConfigError
from rondel.models.block_diffusion.block_cache import CachedLayout
from rondel.models.cache_pools import PoolSlots
from rondel.models.dense_attention import ScoreRule
from rondel.models.elementwise import fill_activations
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.paged_layout import PagedLayout
from rondel.models.recurrent.layout import SegmentStates, SlotStates
from rondel.models.recurrent.mixers import keep_sums_in_order

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.loaded_model import LoadedModel

BLOCK = 64
BUDGET = 1 << 24  # entries of keys that are gathered at once


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    rule: ScoreRule,
) -> Tensor:
    """q [N,H,D], pools [K,P,D], each query's context slots [N,C], of which the first lengths [N]
    are real -> [N,H,D].
    """
    slots = F.pad(slots, (0, -slots.shape[1] % BLOCK))
    some = max(2, BUDGET // (slots.shape[1] * keys.shape[0] * keys.shape[2]))
    pieces = [slice(first, first + some) for first in range(0, len(q), some)]
    out = [_attend_aligned(q[p], keys, values, slots[p], lengths[p], rule) for p in pieces]
    return torch.cat(out) if len(out) > 1 else out[0]


def _attend_aligned(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, rule: ScoreRule) -> Tensor:
    if len(q) == 1:  # a single row may get another kernel
        q, slots, lengths = q.expand(2, -1, -1), slots.expand(2, -1), lengths.expand(2)
        return _attend_aligned(q, keys, values, slots, lengths, rule)[:1]
    n, heads, context = len(q), len(keys), slots.shape[1]
    blocks = context // BLOCK
    where = PoolSlots(slots)
    k, v = (where.read(pool).float().view(heads * n * blocks, BLOCK, -1) for pool in (keys, values))
    folded = q.float().view(n, heads, -1, q.shape[-1]).transpose(0, 1)  # [K,N,R,D]
    repeats = folded.shape[2]
    per_block = folded[:, :, None].expand(-1, -1, blocks, -1, -1).reshape(heads * n * blocks, repeats, -1)
    scores = torch.bmm(per_block, k.transpose(1, 2)).view(heads, n, blocks, repeats, BLOCK) * rule.scale
    scores, at = rule.capped(scores), lengths[:, None] - 1
    distance = at - torch.arange(context, device=q.device)
    scores = rule.with_slopes(scores, distance.view(1, n, blocks, 1, BLOCK), heads, 1, 1, repeats, 1)
    seen = rule.visible(at, distance)
    scores = scores.masked_fill_(~seen.view(1, n, blocks, 1, BLOCK), float("-inf"))
    top = scores.amax((2, 4), keepdim=True)
    if rule.sinks is not None:
        sink = rule.sinks.float().view(heads, 1, 1, repeats, 1)
        top = torch.maximum(top, sink)
    weights = scores.sub_(top).exp_()
    total = _in_order(weights.sum(-1))
    if rule.sinks is not None:
        total = total + (sink - top).exp()[:, :, 0, :, 0]
    parts = torch.bmm(weights.view(heads * n * blocks, repeats, BLOCK), v).view(heads, n, blocks, repeats, -1)
    out = _in_order(parts) / total[..., None]
    return out.transpose(0, 1).reshape(n, heads * repeats, -1).to(q.dtype)


def _in_order(x: Tensor) -> Tensor:
    """[K,N,blocks,...] -> [K,N,...]: one block after the other, so that more blocks of zeros change nothing."""
    out = x[:, :, 0]
    for block in range(1, x.shape[2]):
        out = out + x[:, :, block]
    return out


class AlignedPacked:
    """A `PackedLayout` whose values are computed query by query."""

    def __init__(self, fast: PackedLayout) -> None:
        self.fast = fast

    @property
    def states(self) -> SegmentStates:
        return self.fast.states

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return _Attend.apply(q, k, v, rule.sinks, self, layer, rule)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        return self.attend(layer, q, *up.expand(c, r), rule)

    def weigh_values(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """The packed tokens are the pool: a token's context are the places above it and its own up to itself."""
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        out = torch.empty(len(q), q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        for segment, context in self.fast.segment_contexts:
            start = segment.start - self.fast.first  # the queries that are here begin there
            mine, places = slice(start, start + segment.length), context.to(q.device)
            first = len(places) - segment.length if segment.causal else len(places) - 1
            lengths = torch.arange(first, first + segment.length, device=q.device).clamp_max_(len(places) - 1) + 1
            out[mine] = attend(q[mine], keys, values, places.expand(segment.length, -1), lengths, rule)
        return out


class _Attend(torch.autograd.Function):
    """The sinks stand beside the rule that holds them, so that they get their gradient."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: AlignedPacked, layer: int, rule: ScoreRule
    ):
        ctx.save_for_backward(q, k, v, sinks)
        ctx.layout, ctx.layer, ctx.rule = layout, layer, rule
        return layout.weigh_values(q, k, v, rule)

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad():
            q, k, v, sinks = (x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = ctx.layout.fast.attend(ctx.layer, q, k, v, replace(ctx.rule, sinks=sinks))
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        found = torch.autograd.grad(out, inputs, grad)
        return *found, *[None] * (7 - len(found))


class AlignedPaged:
    """A `PagedLayout` that computes each new token alone over its slots. No families:
    siblings read their common prefix each.
    """

    def __init__(self, fast: PagedLayout) -> None:
        self.fast = fast

    @property
    def states(self) -> SlotStates | None:
        return self.fast.states

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        keys, values = self.fast.store_kv(layer, k, v)
        parts = []
        for c in self.fast.chunks:
            lengths = torch.arange(len(c.context) - c.length, len(c.context), device=q.device) + 1
            mine = q[c.start : c.start + c.length]
            parts.append(attend(mine, keys, values, c.context.expand(c.length, -1), lengths, rule))
        if (d := self.fast.decoding) is not None:
            parts.append(attend(q[len(q) - len(d.own) :], keys, values, d.own, d.lengths, rule))
        return torch.cat(parts)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        """Expanded, context by context: keys and values then have the bits that they have in the trainer."""
        pool = self.fast.store_latents(layer, c, r)[0]
        contexts = [(chunk.start, chunk.length, chunk.context) for chunk in self.fast.chunks]
        if (d := self.fast.decoding) is not None:
            first = len(q) - len(d.own)
            contexts += [(first + i, 1, own[:n]) for i, (own, n) in enumerate(zip(d.own, d.lengths.tolist()))]
        parts = []
        for start, new, slots in contexts:
            known = pool[slots]
            expanded = up.of_rows(start, new).expand(known[:, : up.rank], known[:, up.rank :])
            keys, values = (x.transpose(0, 1) for x in expanded)
            places = torch.arange(len(slots), device=q.device)
            lengths = places[len(slots) - new :] + 1
            parts.append(attend(q[start : start + new], keys, values, places.expand(new, -1), lengths, rule))
        return torch.cat(parts)


def aligned_layout(layout: Any) -> Any:
    """A packed, paged or cached layout (models/block_diffusion/block_cache.py) as it is computed here."""
    if isinstance(layout, CachedLayout):
        return CachedLayout(aligned_layout(layout.packed), layout.held, layout.fresh)
    return AlignedPacked(layout) if isinstance(layout, PackedLayout) else AlignedPaged(layout)


def align_numerics(loaded: LoadedModel) -> None:
    """From now on this model computes with aligned numerics, for the engine and the
    trainer alike; refused where they do not hold.
    """
    if loaded.routers:
        raise ConfigError(
            f"engine.numerics = 'aligned': '{loaded.name}' is a mixture of experts, and what an expert computes "
            "depends on how many tokens it gets; use numerics = 'fast' with routing replay",
            page="docs/train.md#precision",
        )
    if loaded.sight is not None and loaded.sight.mutual:
        raise ConfigError(
            f"engine.numerics = 'aligned': the image tokens of '{loaded.name}' attend to those behind them, and the "
            f"aligned attention reads contexts that end with the query; use numerics = 'fast'",
            page="docs/train.md#precision",
        )
    if loaded.indexers or loaded.compressed:
        raise ConfigError(
            f"engine.numerics = 'aligned': '{loaded.name}' has indexers that choose keys, or compressed ones, and the "
            "aligned attention reads whole contexts; use numerics = 'fast'",
            page="docs/train.md#precision",
        )
    if loaded.state_bytes and not keep_sums_in_order(loaded.model):
        raise ConfigError(
            f"engine.numerics = 'aligned': '{loaded.name}' has recurrent layers, whose sums depend on how a prompt is "
            "cut into chunks (short convolutions alone do not); use numerics = 'fast'",
            page="docs/train.md#precision",
        )
    fill_activations(loaded.model)
    loaded.aligned, loaded.align = True, aligned_layout
    loaded.head.aligned = True
    with loaded.randomized_adapter():
        check_invariance(loaded)


@torch.no_grad()
def check_invariance(loaded: LoadedModel) -> None:
    """Sequences of several lengths, alone and packed in several ways, must give the same
    bits; else aligned numerics are refused.
    """
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(0, len(loaded.head.weight), (n,), generator=generator) for n in (2, 3, 17, 64, 70)]
    alone = [_packed_logprobs(loaded, [row])[0] for row in rows]
    # the last one has as many tokens as a large micro-batch, for which kernels may change once more
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 3, 1, 4, 4, 2], [1] * 11 + [2], [3, 4] * 8):
        for i, got in zip(order, _packed_logprobs(loaded, [rows[i] for i in order])):
            if not torch.equal(got, alone[i]):
                raise ConfigError(
                    f"engine.numerics = 'aligned': '{loaded.name}' in {loaded.dtype} on this {loaded.device.type} "
                    "gives other bits in another batch (largest difference of a probe "
                    f"{float((got - alone[i]).abs().max()):.2g}). Its kernels or odd sizes depend on the batch; use "
                    "numerics = 'fast'"
                )


def _packed_logprobs(loaded: LoadedModel, rows: list[Tensor]) -> list[Tensor]:
    """Of each row's tokens after the first, all rows packed into one forward pass."""
    starts = [sum(len(r) for r in rows[:i]) for i in range(len(rows))]
    layout = PackedLayout([PackedSegment(start, len(row)) for start, row in zip(starts, rows)], loaded.device)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).to(loaded.device)
    hidden = loaded.hidden_states(torch.cat(rows).to(loaded.device), positions, layout)
    sources = torch.cat([torch.arange(start, start + len(row) - 1) for start, row in zip(starts, rows)]).to(
        loaded.device
    )
    targets = torch.cat([row[1:] for row in rows]).to(loaded.device)
    picked = select_logprobs(loaded.head.logits(hidden[sources]), targets)[0]
    return list(picked.split([len(row) - 1 for row in rows]))
