"""Attention whose keys an indexer chooses (DeepSeek V3.2, arXiv:2512.02556): asks the layout in force, and the tape.

A layer's indexer has a key a token, which is cached beside keys and values, and queries and weights of its own. The
layout knows the context of each token and chooses; what was chosen goes to the layer's attention, and where layers
share an indexer to the next ones. A routing tape records the choice in the engine and repeats it in the trainer, so
that the gradient is that of the very attention which was served. The choice itself has no gradient: indexers are
frozen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.attention import attention_layout, current_layout
from rondel.models.key_choice import ALL, IndexedTokens, index_scores
from rondel.models.routing_tape import current_tape

ROTATION = {  # by class: (pairs of neighbours are rotated, else halves; the rotated part stands first)
    "DeepseekV32Indexer": (False, True),
    "AXK2Indexer": (False, True),
    "GlmMoeDsaIndexer": (True, True),
    "Dots3NoteTextIndexer": (True, True),
    "HYV4Indexer": (False, False),
}
PROBE = 4  # keys that an indexer chooses when it is proved
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}  # of the largest score


def install_indexers(model: Any) -> list[Any]:
    """Make a model's indexers ask the layout in force, where there is one. -> they, in the order of their layers."""
    found = [module for module in model.modules() if type(module).__name__ in ROTATION]
    for number, indexer in enumerate(found):
        indexer.requires_grad_(False)
        indexer.forward = functools.partial(_choose, indexer, type(indexer).forward, number)
    for module in model.modules():
        if any(child in found for child in module.children()):
            module.forward = functools.partial(_with_any_mask, module, type(module).forward)
    return found


def _with_any_mask(module: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers hands its mask to the indexer; a layout needs none."""
    if attention_layout() is not None:
        kwargs["attention_mask"] = torch.empty(1, 1, 0, 0)
    return own(module, *args, **kwargs)


@torch.no_grad()
def _choose(
    indexer: Any,
    own: Any,
    number: int,
    hidden: Tensor,
    q_resid: Tensor,
    turns: tuple[Tensor, Tensor],
    *args: Any,
    **kw: Any,
) -> Tensor:
    """hidden [1,T,D], compressed queries [1,T,R] -> positions [1,T,k], or [1,T,0] where all tokens see all keys."""
    if attention_layout() is None:
        return own(indexer, hidden, q_resid, turns, *args, **kw)
    chosen = current_layout().choose_keys(indexer.layer_idx, _index_tokens(indexer, hidden, q_resid, turns))
    if (tape := current_tape()) is not None:
        chosen = tape.select_keys(number, chosen)
    return (chosen if bool((chosen != ALL).any()) else chosen[:, :0])[None]


def _index_tokens(indexer: Any, hidden: Tensor, q_resid: Tensor, turns: tuple[Tensor, Tensor]) -> IndexedTokens:
    q = indexer.wq_b(q_resid)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden).to(indexer.k_norm.weight.dtype)).to(hidden.dtype)[0]
    q, k = (_rotated(indexer, x, turns) for x in (q, k[:, None]))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))[0].float()
    return IndexedTokens(q, k[:, 0], weights * (indexer.n_heads * indexer.head_dim) ** -0.5, indexer.index_topk)


def _rotated(indexer: Any, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x [T,H,d] with its rotary part turned; dimensions may change places, alike for queries and keys."""
    pairs, is_first = ROTATION[type(indexer).__name__]
    size, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    parts = x.split([size, rest] if is_first else [rest, size], -1)
    part, other = parts if is_first else parts[::-1]
    a, b = (part[..., ::2], part[..., 1::2]) if pairs else part.chunk(2, -1)
    cos, sin = (side[0, :, None, : size // 2] for side in turns)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, other], -1).to(x.dtype)


@torch.no_grad()
def check_indexers(model: Any, name: str, indexers: list[Any], row: Tensor) -> None:
    """A pass of transformers' own over tokens [1,T]: its choices must have the largest of our scores. Scores are
    compared and not positions, because either may be taken of two equal ones.
    """
    indexers = [indexer for indexer in indexers if type(indexer).__name__ in ROTATION]
    seen: list[tuple[Any, tuple[Any, ...], Tensor]] = []
    if not indexers:
        return
    hooks = [i.register_forward_hook(lambda i, given, out: seen.append((i, given, out))) for i in indexers]
    counts = [i.index_topk for i in indexers]
    try:
        for indexer in indexers:
            indexer.index_topk = PROBE
        model(row, use_cache=False)
        for indexer, given, theirs in seen:
            tokens = _index_tokens(indexer, *given[:3])
            scores = index_scores(tokens.q[None], tokens.k[None], tokens.weights[None])[0]
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))[PROBE:]
            best, taken = scores.topk(PROBE).values, scores.gather(-1, theirs[0, PROBE:].long()).sort(-1, True).values
            if not float((best - taken).abs().max()) <= TOLERANCE[model.dtype] * float(best.abs().max()):
                raise ModelError(
                    f"'{name}' ({model.config.model_type}): its indexer of layer {indexer.layer_idx} chooses keys that "
                    f"score {float((best - taken).abs().max()):.3g} lower here than the best ones; the choice is not "
                    "carried by the built-in path"
                )
    finally:
        for indexer, count in zip(indexers, counts, strict=True):
            indexer.index_topk = count
        for hook in hooks:
            hook.remove()
