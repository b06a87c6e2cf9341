"""Keys and values of prompts and whole blocks, which no later step of their answers changes.

    cached:  prompt ── block 0 ── block 1        new:  ── block 2, whole since the last step ── state of block 3
    keys of a pass  [ those cached of all answers in it │ those of the row that it computes ]

A block is computed once whole, in the pass behind the one that drew its last token; before that it is computed in each
of its states. L layers · K key/value heads · D head size
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.unmasking_steps import ABSENT
from rondel.models.packed_layout import PackedLayout, PackedSegment

if TYPE_CHECKING:
    from rondel.models.attention import LatentProjection
    from rondel.models.dense_attention import ScoreRule

Prefix = tuple[bytes, bytes]  # a prompt, and the tokens of the whole blocks behind it


@dataclass(slots=True, eq=False)
class CachedSegment:
    """tokens: how many. layers: keys and values [tokens, K, D] of each layer."""

    tokens: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class BlockState:
    """What one answer asks for: its block in a state, behind its prompt and its whole blocks.

    prompt [P] · whole [n·B] · state [B], in which ABSENT stands behind the last position
    """

    prompt: np.ndarray
    whole: np.ndarray
    state: np.ndarray

    @property
    def prefixes(self) -> list[tuple[Prefix, np.ndarray]]:
        """The prompt and each whole block: what it ends, and its tokens."""
        size, prompt = len(self.state), self.prompt.tobytes()
        ends = range(0, len(self.whole) + 1, size)
        return [
            ((prompt, self.whole[:end].tobytes()), self.whole[end - size : end] if end else self.prompt) for end in ends
        ]


class BlockCache:
    """What is cached belongs to weights: `clear()` when these change."""

    def __init__(self) -> None:
        self.segments: dict[Prefix, CachedSegment] = {}

    def clear(self) -> None:
        self.segments.clear()

    def keep_only(self, states: Iterable[BlockState]) -> None:
        """Those of answers that go on."""
        used = {prefix for own in states for prefix, _ in own.prefixes}
        self.segments = {prefix: own for prefix, own in self.segments.items() if prefix in used}

    @property
    def bytes_held(self) -> int:
        layers = (pair for own in self.segments.values() for pair in own.layers.values())
        return sum(x.nbytes for pair in layers for x in pair)


@dataclass(slots=True)
class CachedPass:
    """One pass over what is not cached: prompts, blocks that are whole now, and a block of each answer in its state.

    tokens, positions  [T]  the row
    states             [n]  where the state of each answer begins in it
    """

    tokens: Tensor
    positions: Tensor
    states: np.ndarray
    layout: CachedLayout

    @classmethod
    def of(cls, cache: BlockCache, asked: Sequence[BlockState], device: torch.device | str) -> CachedPass:
        """What it computes of prompts and whole blocks is cached behind it."""
        chains = [own.prefixes for own in asked]
        known = list(dict.fromkeys(prefix for chain in chains for prefix, _ in chain if prefix in cache.segments))
        held, at, first = [cache.segments[prefix] for prefix in known], 0, 0
        segments: list[PackedSegment] = []
        number: dict[Prefix, int] = {}
        parents = {prefix: chain[i - 1][0] if i else None for chain in chains for i, (prefix, _) in enumerate(chain)}
        row: list[tuple[np.ndarray, int]] = []
        fresh: list[tuple[slice, CachedSegment]] = []

        def place(tokens: int, above: Prefix | None, *, causal: bool) -> int:
            nonlocal at
            segments.append(PackedSegment(at, tokens, None if above is None else number[above], causal))
            at += tokens
            return len(segments) - 1

        for prefix, own in zip(known, held, strict=True):
            number[prefix] = place(own.tokens, parents[prefix], causal=not prefix[1])
        first = at
        for chain in chains:
            position = 0
            for prefix, tokens in chain:
                if prefix not in number:
                    made = cache.segments[prefix] = CachedSegment(len(tokens))
                    fresh.append((slice(at - first, at - first + len(tokens)), made))
                    number[prefix] = place(len(tokens), parents[prefix], causal=not prefix[1])
                    row.append((tokens, position))
                position += len(tokens)
        states = []
        for wanted, chain in zip(asked, chains, strict=True):
            shown = wanted.state[wanted.state != ABSENT]
            states.append(at - first)
            place(len(shown), chain[-1][0], causal=False)
            row.append((shown, len(wanted.prompt) + len(wanted.whole)))
        packed = PackedLayout(segments, device, own=range(len(known), len(segments)))
        return cls(
            torch.from_numpy(np.concatenate([tokens for tokens, _ in row])).long().to(device),
            torch.from_numpy(np.concatenate([np.arange(p, p + len(tokens)) for tokens, p in row])).to(device),
            np.array(states),
            CachedLayout(packed, held, fresh),
        )


class CachedLayout:
    """A `PackedLayout` whose first segments are cached: a row has the queries of the others."""

    def __init__(
        self, packed: Any, held: Sequence[CachedSegment], fresh: Sequence[tuple[slice, CachedSegment]]
    ) -> None:
        """`held`: the cached ones, in order. `fresh`: those of the row that are cached behind its pass,
        by their places."""
        self.packed, self.held, self.fresh = packed, held, fresh

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        for places, own in self.fresh:
            own.layers[layer] = (k[places].clone(), v[places].clone())
        if self.held:
            k = torch.cat([*(own.layers[layer][0] for own in self.held), k])
            v = torch.cat([*(own.layers[layer][1] for own in self.held), v])
        out: Tensor = self.packed.attend(layer, q, k, v, rule)
        return out

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        return self.attend(layer, q, *up.expand(c, r), rule)
