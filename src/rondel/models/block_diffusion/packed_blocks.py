"""Answers in blocks, packed for one pass: every state in which a token was drawn stands once,
behind what was whole then.

    prompt ──> block 0 ──> block 1 ─ ─ >        whole blocks, each seen by what stands behind it
       │          └── states of block 1         tokens that were known then, masks elsewhere
       └── states of block 0

A prompt is causal; a block, whole or not, sees itself both ways and all above it. T packed tokens · M drawn tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.unmasking_steps import ABSENT, MASKED, UnmaskedAnswers
from rondel.models.packed_layout import PackedLayout, PackedSegment

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel


class BlockRow:
    """The row while it is laid."""

    def __init__(self) -> None:
        self.segments: list[PackedSegment] = []
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.at = 0
        self._prompts: dict[bytes, int | None] = {}

    def place_prompt(self, prompt: np.ndarray) -> int | None:
        """Its segment, laid once however many answers it has."""
        key = prompt.tobytes()
        if key not in self._prompts:
            self._prompts[key] = self.place(prompt, 0, None, causal=True) if len(prompt) else None
        return self._prompts[key]

    def place(self, tokens: np.ndarray, position: int, above: int | None, *, causal: bool = False) -> int:
        """A segment of tokens from `position` on, behind the segment `above`. -> its number"""
        self.segments.append(PackedSegment(self.at, len(tokens), above, causal))
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, position + len(tokens)))
        self.at += len(tokens)
        return len(self.segments) - 1

    def place_answer(self, prompt: np.ndarray, answer: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """seen [K, B] of K tokens, `answer` [K] the tokens -> [K] where each of them is predicted."""
        above, size = self.place_prompt(prompt), seen.shape[1]
        source = np.empty(len(seen), np.int64)
        for first in range(0, len(seen), size):
            states: dict[bytes, int] = {}
            for k in range(first, min(first + size, len(seen))):
                state = seen[k]
                key = state.tobytes()
                if key not in states:
                    states[key] = self.at
                    self.place(state[state != ABSENT], len(prompt) + first, above)
                source[k] = states[key] + k - first
            if first + size < len(seen):
                above = self.place(answer[first : first + size], len(prompt) + first, above)
        return source


@dataclass(slots=True)
class PackedBlocks:
    """
    tokens, positions  [T]  the row, in which masks are MASKED
    source             [M]  where each drawn token is predicted: at its own position, under a mask
    target             [M]  the token
    weight             [M]  of its log-probability: 1, or in a demonstration `UnmaskingSteps.weights`
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedLayout
    source: Tensor
    target: Tensor = field(default_factory=lambda: torch.empty(0))
    weight: Tensor = field(default_factory=lambda: torch.empty(0))

    def hidden_states(self, loaded: LoadedModel) -> Tensor:
        """[M, D] of the positions where tokens are predicted."""
        tokens = hide_masks(self.tokens, loaded)
        return loaded.hidden_states(tokens, self.positions, self.layout).index_select(0, self.source)

    @classmethod
    def of(cls, found: UnmaskedAnswers, device: torch.device | str) -> PackedBlocks:
        """Equal prompts are laid once."""
        row, source = BlockRow(), []
        for own, prompt, answer in zip(found.steps, found.prompts, found.answers, strict=True):
            if len(own) != len(answer):
                raise ValueError(
                    f"{len(own)} unmasking steps in {len(answer)} tokens behind the prompt: a policy that fills in "
                    "blocks answers once"
                )
            source.append(row.place_answer(prompt, answer, own.seen))
        packed = cls.of_row(row, source, device)
        packed.target = torch.from_numpy(np.concatenate(found.answers)).long().to(device)
        packed.weight = torch.from_numpy(np.concatenate([own.weights for own in found.steps])).to(device)
        return packed

    @classmethod
    def of_row(cls, row: BlockRow, source: Sequence[Any], device: torch.device | str) -> PackedBlocks:
        return cls(
            torch.from_numpy(np.concatenate(row.tokens)).long().to(device),
            torch.from_numpy(np.concatenate(row.positions)).to(device),
            PackedLayout(row.segments, device),
            torch.from_numpy(np.concatenate(source)).long().to(device),
        )


def hide_masks(tokens: Tensor, loaded: LoadedModel) -> Tensor:
    """The id of the mask where MASKED stands.  [T] -> [T]"""
    assert loaded.blocks is not None
    return tokens.masked_fill(tokens == MASKED, loaded.blocks.mask_token)
