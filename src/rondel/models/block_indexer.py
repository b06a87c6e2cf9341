"""Attention to blocks of tokens that an indexer chooses (Qwen4-Exp): its key of a block is the mean of its tokens'
keys.

    score_tb = sum_h relu(q_th . norm(mean_{s in b} k_s))       t attends to the tokens of the k whole blocks of the
                                                                largest score, and to those of the block it is in
The open block of a sequence is a state (recurrent/window_compression.py), as is how many tokens it has: the layers are
not told positions. Whole blocks lie in the cache with their last tokens, as entries of DeepSeek V4 do
(models/compressed_attention.py), and a choice is recorded as these positions.

T tokens · H heads of size d · m tokens of a block · k blocks
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.attention import attention_layout, current_layout
from rondel.models.key_choice import ALL, IndexedTokens, index_scores
from rondel.models.recurrent.layout import OneSegment, RecurrentLayout, SegmentStates
from rondel.models.recurrent.window_compression import WindowCompression
from rondel.models.routing_tape import current_tape

INDEXER, ROTARY = "Qwen4ExpTextQSAIndexer", "Qwen4ExpTextRotaryEmbedding"
BLOCKS = 6  # of an indexer when it is proved; it chooses half of them
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}  # of the largest score


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Inputs ones [B, L]; outputs the position of each token [B, L], state [B, 1]."""

    name: str = "count"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (1,)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.int64

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        seen = state + inputs[0].cumsum(1)
        return seen - 1, seen[:, -1:]


def install_block_indexers(model: Any) -> list[Any]:
    """Make such indexers ask the layout in force, where there is one. -> they, in the order of their layers."""
    found: list[Any] = []
    rotary: Any = next((m for m in model.modules() if type(m).__name__ == ROTARY), None)
    for module in model.modules():
        indexer: Any = getattr(module, "indexer", None)
        if type(indexer).__name__ == INDEXER:
            indexer.requires_grad_(False)
            indexer.index_topk = indexer.block_topk
            module.forward = functools.partial(_attend, module, type(module).forward, len(found), rotary)
            indexer.forward = functools.partial(_leave_choice, indexer, type(indexer).forward)
            found.append(indexer)
    return found


def _attend(
    module: Any, own: Any, number: int, rotary: Any, hidden_states: Tensor, turns: Any, *args: Any, **kwargs: Any
) -> Any:
    """The module's own attention to the tokens of chosen blocks; `number`: of its indexer."""
    if attention_layout() is None:
        return own(module, hidden_states, turns, *args, **kwargs)
    kwargs |= {"attention_mask": torch.ones(1, 1, 0, 0, dtype=torch.bool), "past_key_values": None}
    indices = _choose_tokens(module.indexer, number, rotary, hidden_states, turns)
    return own(module, hidden_states, turns, indices=indices, **kwargs)


def _leave_choice(indexer: Any, own: Any, hidden: Tensor, turns: Any, mask: Any, *args: Any) -> Tensor:
    """Where a layout is in force, the choice has been made, and goes to attention another way."""
    return own(indexer, hidden, turns, mask, *args) if attention_layout() is None else mask


@torch.no_grad()
def _choose_tokens(indexer: Any, number: int, rotary: Any, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """-> positions [1,T,(k + 1) m - 1], or [1,T,0] where all tokens see all keys."""
    layout, layer = current_layout(), indexer.layer_idx
    ones = torch.ones(hidden.shape[1], dtype=torch.int64, device=hidden.device)
    positions = layout.states.scan(layer, TokenCount(), ones)
    chosen = layout.choose_keys(layer, _index_tokens(indexer, layout.states, rotary, hidden, turns, positions))
    if (tape := current_tape()) is not None:
        chosen = tape.select_keys(number, chosen)
    if not bool((chosen != ALL).any()):
        return chosen[None, :, :0]
    return _tokens_of_blocks(chosen, positions, indexer.compress_ratio)[None]


def _index_tokens(
    indexer: Any, states: RecurrentLayout, rotary: Any, hidden: Tensor, turns: tuple[Tensor, Tensor], positions: Tensor
) -> IndexedTokens:
    size, rate = indexer.index_head_dim, indexer.compress_ratio
    q, k = indexer.index_qk_proj(hidden)[0].split([indexer.index_n_heads * size, size], -1)
    q = _rotated(indexer.q_layernorm(q.unflatten(-1, (-1, size))), *(side[0] for side in turns))
    mean = WindowCompression(k.new_zeros(rate, size, dtype=torch.float32), size, torch.float32, "index block")
    blocks = states.scan(indexer.layer_idx, mean, k.float(), torch.zeros_like(k, dtype=torch.float32), positions)
    first = (positions - rate + 1).clamp_min(0).expand(3, 1, -1)
    blocks = indexer.k_layernorm(blocks.to(k.dtype))[:, None]
    blocks = _rotated(blocks, *(side[0] for side in rotary(hidden, first)))[:, 0]
    weights = torch.full(q.shape[:2], size**-0.5, device=q.device)
    return IndexedTokens(q, blocks, weights, indexer.block_topk, rate)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T,H,d] with its first numbers turned, halves against each other; cos and sin [T, R]."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    a, b = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
    return torch.cat([turned, rest], -1).to(x.dtype)


def _tokens_of_blocks(chosen: Tensor, positions: Tensor, rate: int) -> Tensor:
    """Last positions of blocks [T,k], ALL for none, of tokens at `positions` [T] -> positions of the tokens that each
    one sees [T,(k + 1) m - 1]: of these blocks, and of its own block as far as that is open.
    """
    back = torch.arange(rate, device=chosen.device)
    blocks = (chosen[:, :, None] - back).flatten(1)
    tail = positions[:, None] - back[:-1]
    tail = torch.where(tail >= (positions[:, None] + 1) // rate * rate, tail, chosen[:, :1])
    return torch.cat([blocks, tail], 1).masked_fill((chosen == ALL).all(1, keepdim=True), ALL)


@torch.no_grad()
def check_block_indexers(model: Any, name: str, indexers: list[Any]) -> None:
    """Choices of transformers' own indexers over noise of a few blocks; a probe of tokens is too short. Their scores
    are compared, because either block may be taken of two equal ones.
    """
    rotary: Any = next((m for m in model.modules() if type(m).__name__ == ROTARY), None)
    for indexer in (i for i in indexers if type(i).__name__ == INDEXER):
        rate, noise = indexer.compress_ratio, torch.Generator().manual_seed(5)
        count = BLOCKS * rate + rate // 2
        hidden = torch.randn(1, count, indexer.index_qk_proj.in_features, generator=noise).to(model.device, model.dtype)
        positions = torch.arange(count, device=model.device)
        turns = rotary(hidden, positions.expand(3, 1, -1))
        mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=model.device).tril()
        kept, indexer.block_topk = (indexer.block_topk, indexer.token_budget), BLOCKS // 2
        indexer.token_budget = indexer.block_topk * rate
        try:
            theirs = type(indexer).forward(indexer, hidden, turns, mask, None)[0, 0, -1, rate - 1 :: rate]
        finally:
            indexer.block_topk, indexer.token_budget = kept
        states = SegmentStates([OneSegment(0, count)], model.device)
        tokens = _index_tokens(indexer, states, rotary, hidden, turns, positions)
        ends = tokens.k[None, rate - 1 :: rate]
        scores = index_scores(tokens.q[None, -1:], ends, tokens.weights[None, -1:])[0, 0]
        gap = float((scores.topk(BLOCKS // 2).values - scores[theirs].sort(descending=True).values).abs().max())
        if not gap <= TOLERANCE[model.dtype] * float(scores.max()):
            raise ModelError(
                f"'{name}' ({model.config.model_type}): its indexer of layer {indexer.layer_idx} chooses blocks that "
                f"score {gap:.3g} lower here than the best ones; the choice is not carried by the built-in path"
            )
