"""Attention over a sliding window of tokens and compressed entries of all that is older (DeepSeek V4), in one softmax.

    kv_t     key and value of a token at once, one for all heads      seen within the sliding window
    entry_w  of a window of m tokens (recurrent/window_compression.py)      seen by tokens from its last one on:
             all of them (heavily compressed), or those that an indexer chooses (compressed sparse)
    sink_h   one more logit a head

Values carry the rotation of their keys' positions, which the output turns back. An indexer has entries of its own as
keys. Its choice holds positions of the entries' last tokens, and is recorded and repeated like every other one
(models/key_choice.py).

T tokens · H heads · D size of a head · R rotary numbers of it, its last ones
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.attention import attention_layout, current_layout
from rondel.models.compressed_entries import CompressedEntries
from rondel.models.dense_attention import ScoreRule
from rondel.models.key_choice import IndexedTokens, choose_keys, index_scores
from rondel.models.recurrent.layout import OneSegment, RecurrentLayout, SegmentStates
from rondel.models.recurrent.window_compression import WindowCompression
from rondel.models.routing_tape import current_tape

ATTENTION = "DeepseekV4Attention"
WINDOWS = 7  # of a compressor when it is proved; its indexer chooses fewer
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the largest entry or score


@dataclass(frozen=True, slots=True)
class CompressedLayers:
    """Of one model: whether any layer has such attention, which ones compress, and their indexers in order."""

    any: bool
    compressing: list[int]
    indexers: list[Any]


def install_compressed_attention(model: Any) -> CompressedLayers:
    """Make such attention ask the layout in force, where there is one."""
    found = [module for module in model.modules() if type(module).__name__ == ATTENTION]
    indexers: list[Any] = []
    for module in found:
        number = len(indexers)
        if (indexer := getattr(module.compressor, "indexer", None)) is not None:
            indexer.requires_grad_(False)
            indexers.append(indexer)
        module.forward = functools.partial(_attend, module, type(module).forward, number)
    compressing = [module.layer_idx for module in found if module.compressor is not None]
    return CompressedLayers(bool(found), compressing, indexers)


def _attend(module: Any, own: Any, number: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """hidden [1,T,C] -> [1,T,C], as the module's own; `number`: of its indexer, if it has one."""
    if attention_layout() is None:
        return own(module, hidden_states, *args, **kwargs)
    if hidden_states.shape[0] != 1:
        raise ModelError(f"batch of {hidden_states.shape[0]}: tokens are packed into one row [1, T], without padding")
    layout, layer, positions = current_layout(), module.layer_idx, kwargs["position_ids"][0]
    cos, sin = (side[0] for side in kwargs["position_embeddings"][module.rope_layer_type])
    residual = module.q_a_norm(module.q_a_proj(hidden_states))
    q = module.q_b_norm(module.q_b_proj(residual)[0].unflatten(-1, (-1, module.head_dim)))
    kv = module.kv_norm(module.kv_proj(hidden_states))[0]
    q, kv = rotate_pairs(q, cos, sin), rotate_pairs(kv[:, None], cos, sin)[:, 0]
    entries = chosen = None
    if (compressor := module.compressor) is not None:
        entries = _compress(compressor, layout.states, layer, hidden_states, positions, "window")
        if (indexer := getattr(compressor, "indexer", None)) is not None:
            with torch.no_grad():
                tokens = _index_tokens(indexer, layout.states, layer, hidden_states, residual, positions)
                chosen = layout.choose_keys(layer, tokens)
            if (tape := current_tape()) is not None:
                chosen = tape.select_keys(number, chosen)
    rule = ScoreRule(module.scaling, module.sliding_window, sinks=module.sinks, chosen=chosen)
    out = rotate_pairs(layout.attend_compressed(layer, q, kv, entries, rule), cos, -sin)
    grouped = out.reshape(1, len(out), module.config.o_groups, -1)
    return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None


def _compress(
    part: Any, states: RecurrentLayout, layer: int, hidden: Tensor, positions: Tensor, name: str
) -> CompressedEntries:
    """Entries of a compressor, or of an indexer: its norm, and the rotation of each window's first position."""
    kv, gate = part.kv_proj(hidden)[0], part.gate_proj(hidden)[0]
    rule = WindowCompression(part.position_bias, part.head_dim, kv.dtype, name)
    entries = part.kv_norm(states.scan(layer, rule, kv, gate, positions))
    first = (positions - rule.rate + 1).clamp_min(0)
    cos, sin = part.rotary_emb(entries, position_ids=first[None], layer_type=part.rope_layer_type)
    return CompressedEntries(rotate_pairs(entries[:, None], cos[0], sin[0])[:, 0], rule.rate)


def _index_tokens(
    indexer: Any, states: RecurrentLayout, layer: int, hidden: Tensor, residual: Tensor, positions: Tensor
) -> IndexedTokens:
    entries = _compress(indexer, states, layer, hidden, positions, "index window")
    q = indexer.q_b_proj(residual)[0].unflatten(-1, (indexer.num_heads, indexer.head_dim))
    cos, sin = indexer.rotary_emb(hidden, position_ids=positions[None], layer_type=indexer.rope_layer_type)
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden)[0].float() * (scorer.softmax_scale * scorer.weights_scaling)
    q = rotate_pairs(q, cos[0], sin[0])
    return IndexedTokens(q, entries.rows, weights, indexer.index_topk, entries.rate)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T,H,D] with the neighbours among its last R numbers turned; cos and sin [T, R/2]."""
    rest, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = turned[..., ::2].float(), turned[..., 1::2].float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([rest, turned.to(x.dtype)], -1)


@torch.no_grad()
def check_compressors(model: Any, name: str) -> None:
    """Entries and choices of transformers' own compressors, over noise of a few windows; a probe of tokens is too
    short.
    """
    for module in model.modules():
        if type(module).__name__ != ATTENTION or module.compressor is None:
            continue
        part, noise = module.compressor, functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
        count = WINDOWS * part.compress_rate + 2
        widths = (module.q_a_proj.in_features, module.q_b_proj.in_features)
        hidden, residual = (noise(1, count, n).to(model.device, model.dtype) for n in widths)
        positions = torch.arange(count, device=model.device)
        states = SegmentStates([OneSegment(0, count)], model.device)
        ends = slice(part.compress_rate - 1, None, part.compress_rate)
        ours = [_compress(part, states, module.layer_idx, hidden, positions, "window").rows[ends]]
        if (indexer := getattr(part, "indexer", None)) is not None:
            kept, indexer.index_topk = indexer.index_topk, WINDOWS // 2
        try:
            own, bias = part(hidden, residual, positions[None], None, module.layer_idx)
            theirs = [own[0, 0]]
            if indexer is not None:
                tokens = _index_tokens(indexer, states, module.layer_idx, hidden, residual, positions)
                scores = index_scores(tokens.q[None], tokens.k[None, ends], tokens.weights[None])[0]
                chosen = choose_keys(
                    tokens.q[None], tokens.k[None, ends], tokens.weights[None], positions[None],
                    positions[None, ends], tokens.count,
                )[0, -1]  # fmt: skip
                ours.append(scores[-1, chosen // part.compress_rate].sort().values)
                theirs.append(scores[-1, bias[0, 0, -1] == 0].sort().values)
        finally:
            if indexer is not None:
                indexer.index_topk = kept
        for mine, other in zip(ours, theirs, strict=True):
            gap = float((mine - other).abs().max()) if mine.shape == other.shape else float("inf")
            if not gap <= TOLERANCE[model.dtype] * float(other.abs().max()):
                raise ModelError(
                    f"'{name}' ({model.config.model_type}): what layer {module.layer_idx} compresses its windows to, "
                    f"or chooses of them, differs by {gap:.3g} here; its attention is not carried by the built-in path"
                )
