"""Embeddings of n-grams, which join the residual streams of some layers (Qwen4-Exp).

n-gram ids   the last tokens of a sequence, up to the last end of text, are hashed        state: ids of n - 1 tokens
features     sigmoid(gate) value, and a dilated convolution of them                       state: its window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.models.recurrent.convolution import CausalConv
from rondel.models.recurrent.layout import RecurrentLayout


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Inputs one x [B, L] of ids plus one; outputs each token with the `count` before it, [B, L, count + 1], oldest
    first and 0 before the first one; state [B, count].
    """

    count: int
    name: str = "last tokens"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.count,)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.int64

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        seen = torch.cat([state, x], 1)
        out = seen.unfold(1, self.count + 1, 1)
        if lengths is None:
            return out, seen[:, x.shape[1] :]
        return out, seen.gather(1, lengths[:, None] + torch.arange(self.count, device=x.device))


def forward_ngram_layer(mixer: Any, states: RecurrentLayout, hidden: Tensor, *, input_ids: Tensor, **_: Any) -> Tensor:
    """Streams hidden [1, T, S D] and ids [1, T] -> what is added to the streams [1, T, S D], for Qwen4-Exp."""
    embedding = mixer.ple_embedding
    last = states.scan(mixer.layer_idx, LastTokens(embedding.context_len), input_ids[0].long() + 1)
    found = embedding.ngram_embedding(_ngram_ids(embedding, last - 1)).flatten(-2)[None]
    key, query = mixer.norm_key(mixer.key_proj(found)), mixer.norm_query(hidden)
    key, query = (x.unflatten(-1, (mixer.hc_count, mixer.hidden_size)) for x in (key, query))
    gate = (key * query).sum(-1, keepdim=True) / math.sqrt(mixer.hidden_size)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    value = (gate.sigmoid() * mixer.value_proj(found).unsqueeze(-2)).flatten(-2)
    window = CausalConv.of(mixer.conv1d, name="n-gram window")
    return value + F.silu(states.scan(mixer.layer_idx, window, mixer.norm_conv(value)[0]))[None]


def _ngram_ids(embedding: Any, last: Tensor) -> Tensor:
    """Ids [T, n], oldest first, -1 before the first token -> rows of the embedding [T, heads]."""
    end = embedding.eos_token_id
    shifted, in_text = [last[:, -1]], torch.ones_like(last[:, 0], dtype=torch.bool)
    for shift in range(1, embedding.ngram_size):
        token = last[:, -1 - shift]
        in_text = in_text & (token != end) & (token >= 0)
        shifted.append(torch.where(in_text, token, end))
    rows, heads, mixed = [], embedding.heads_per_ngram, shifted[0] * embedding.layer_multipliers[0]
    for n in range(1, embedding.ngram_size):
        mixed = mixed ^ (shifted[n] * embedding.layer_multipliers[n])
        own = slice((n - 1) * heads, n * heads)
        sizes, offsets = embedding.ngram_heads_vocab_sizes[own], embedding.ngram_heads_offsets[own]
        rows.append(torch.remainder(mixed[:, None], sizes) + offsets)
    return torch.cat(rows, -1)
