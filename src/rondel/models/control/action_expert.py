"""The action expert of pi0 (arXiv:2410.24164): a token for each action of a chunk, and a layer for each of the backbone's.

    backbone   layer l of the prefix  ──keys and values of all its tokens──┐
    expert     layer l of the chunk   queries ──attention over these and the chunk's own, both ways──> hidden states

A query sees what stands before the chunk, and all actions of its chunk. Queries and keys of the chunk are turned as
those of the backbone are, at the places behind the prefix.

M chunks · S noise levels · H actions of A numbers · D = H·A · W width · K key heads of d numbers · T tokens of all prefixes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.models.aligned_numerics import attend
from rondel.models.dense_attention import ScoreRule
from rondel.models.elementwise import silu


@dataclass(frozen=True, slots=True)
class PrefixStates:
    """What M chunks read of the prefixes before them.

    states         [M, W] of the last token of each
    keys, values   [T, K, d] by layer
    first, length  [M] where the prefix of a chunk begins among the T, and how many tokens it has
    cos, sin       [M, H, d] of the angles of the places behind it
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    first: Tensor
    length: Tensor
    cos: Tensor
    sin: Tensor


class ActionExpert(nn.Module):
    """layers: as many as the backbone has, with its heads."""

    def __init__(self, width: int, entries: int, text: Any) -> None:
        """entries: numbers of an action and of its noise level; text: the backbone's config of text."""
        super().__init__()
        heads, size = text.num_attention_heads, getattr(text, "head_dim", None)
        size = size or text.hidden_size // heads
        self.enter = nn.Linear(entries, width)
        self.layers = nn.ModuleList(
            ExpertLayer(width, heads, text.num_key_value_heads, size) for _ in range(text.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, entries: Tensor, prefix: PrefixStates) -> Tensor:
        """[M, S, H, A and the level's numbers] -> [M, S, H, W]"""
        m, s, h, _ = entries.shape
        hidden = (self.enter(entries) + prefix.states[:, None, None]).flatten(0, 2)
        places, lengths = _places(prefix, s, h)
        turns = [part[:, None].expand(-1, s, -1, -1).flatten(0, 2) for part in (prefix.cos, prefix.sin)]
        for layer, keys, values in zip(self.layers, prefix.keys, prefix.values, strict=True):
            hidden = layer(hidden, turns, keys, values, places, lengths)
        found: Tensor = self.norm(hidden).view(m, s, h, -1)
        return found


def _places(prefix: PrefixStates, s: int, h: int) -> tuple[Tensor, Tensor]:
    """Of each of the M·S·H queries the keys that it sees: of the T of the prefixes its own, then, behind all T, those of its
    chunk.  -> [M·S·H, C] of which the first [M·S·H] are real"""
    total, device = len(prefix.keys[0]), prefix.first.device
    longest, m = int(prefix.length.max()) + h, len(prefix.first)
    j, length = torch.arange(longest, device=device), prefix.length[:, None, None]
    chunk = torch.arange(m * s, device=device).view(m, s, 1)
    own = total + chunk * h + (j - length).clamp(0, h - 1)
    places = torch.where(j < length, prefix.first[:, None, None] + j, own)
    places = places.where(j < length + h, torch.zeros_like(places))
    return places.repeat_interleave(h, 1).flatten(0, 1), (prefix.length + h).repeat_interleave(s * h)


class ExpertLayer(nn.Module):
    """Attention, then an MLP on each token, each behind a norm."""

    def __init__(self, width: int, heads: int, key_heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.norm, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, heads * size)
        self.key = nn.Linear(width, key_heads * size)
        self.value = nn.Linear(width, key_heads * size)
        self.out = nn.Linear(heads * size, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, hidden: Tensor, turns: list[Tensor], keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor
    ) -> Tensor:
        """[N, W], cosines and sines [N, d], those of the prefixes [T, K, d], [N, C], [N] -> [N, W]"""
        x = self.norm(hidden)
        q, k, v = (part(x).unflatten(1, (-1, self.size)) for part in (self.query, self.key, self.value))
        q, k = (_turned(part, turns) for part in (q, k))
        seen = _AttendPlaces.apply(q, torch.cat([keys, k]), torch.cat([values, v]), places, lengths)
        hidden = hidden + self.out(seen.flatten(1))
        result: Tensor = hidden + self.down(silu(self.up(self.norm_up(hidden))))
        return result


def _turned(x: Tensor, turns: list[Tensor]) -> Tensor:
    """[N, K, d]: number i and number i + d / 2 turned by the i-th angle, as the backbones here do it."""
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


class _AttendPlaces(torch.autograd.Function):
    """Its value is that of aligned numerics: a query has the same bits whatever is beside it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """[N, Q, d], [P, K, d], [P, K, d], [N, C] of which the first [N] are real -> [N, Q, d]"""
        ctx.save_for_backward(q, keys, values, places, lengths)
        pools = (keys.transpose(0, 1), values.transpose(0, 1))
        return attend(q, *pools, places, lengths, ScoreRule(q.shape[-1] ** -0.5))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, keys, values, places, lengths = ctx.saved_tensors
        with torch.enable_grad():
            q, keys, values = (x.detach().requires_grad_() for x in (q, keys, values))
            found = torch.autograd.grad(attend_places(q, keys, values, places, lengths), (q, keys, values), grad)
        return *found, None, None


def attend_places(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """The same in torch's own operations: softmax(q·k / √d)·v over the places of a query."""
    seen = torch.arange(places.shape[1], device=q.device) < lengths[:, None]
    k, v = (x[places].transpose(1, 2) for x in (keys, values))  # [N, K, C, d]
    folded = q.unflatten(1, (k.shape[1], -1))  # [N, K, Q / K, d]
    found = F.scaled_dot_product_attention(folded, k, v, attn_mask=seen[:, None, None])
    return found.flatten(1, 2)
