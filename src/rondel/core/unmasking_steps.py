"""Steps of a policy that fills in blocks of masks: what it saw when it drew each token.

K tokens that the policy wrote · B positions of a block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

MASKED, ABSENT = -1, -2  # what stands in the place of a token: a mask, or the end of a block that is shorter
SHOWN = -1  # the step of a token of a demonstration, which nobody drew


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskingSteps:
    """One row for each of K tokens. Token k stands in block k // B of the answer, at its position k % B.

    rows   [K, 1 + B] int32: the step of its block in which it was drawn, and the block as it stood before that step: a
           token, MASKED or ABSENT for each position

    All tokens of one step have the same block, so the trainer computes it once. A demonstration has SHOWN for a step:
    its block is masked at random, and the tokens that are masked there are learned from the others.
    """

    rows: np.ndarray

    are_densities: ClassVar[bool] = False
    layout: ClassVar[int] = 0
    observed: ClassVar[int] = 0
    after: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.dtype != np.int32 or self.rows.shape[1] < 2:
            raise ValueError(f"steps of {self.rows.dtype} {list(self.rows.shape)}: they are int32 [K, 1 + B]")

    @property
    def stored(self) -> np.ndarray:
        """One array for a file."""
        return self.rows

    @property
    def block(self) -> int:
        """B"""
        return self.rows.shape[1] - 1

    @property
    def step(self) -> np.ndarray:
        """[K] of its block; SHOWN in a demonstration."""
        return self.rows[:, 0]

    @property
    def seen(self) -> np.ndarray:
        """[K, B] the block of each token before it was drawn."""
        return self.rows[:, 1:]

    @property
    def weights(self) -> np.ndarray:
        """[K] 1 for a token that was drawn. In a demonstration with n of L positions masked, L / n for a token that is
        masked and 0 for one that is shown: 1 / t of arXiv:2502.09992 at t = n / L.
        """
        k = np.arange(len(self.rows))
        hidden = self.seen[k, k % self.block] == MASKED
        masked = (self.seen == MASKED).sum(1)
        bound = hidden * (self.seen != ABSENT).sum(1) / np.maximum(masked, 1)
        return np.where(self.step == SHOWN, bound, 1.0).astype(np.float32)

    @property
    def copied(self) -> int:
        """Tokens of the blocks in all states in which something was drawn: what training computes beside the answer."""
        block = np.arange(len(self.rows)) // self.block
        _, first = np.unique(block * (self.block + 1) + self.step + 1, return_index=True)
        return int((self.seen[first] != ABSENT).sum())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> UnmaskingSteps:
        return UnmaskingSteps(self.rows[part])

    def __add__(self, more: UnmaskingSteps) -> UnmaskingSteps:
        if more.block != self.block:
            raise ValueError(f"blocks of {more.block} behind blocks of {self.block}: one trajectory has one size")
        return UnmaskingSteps(np.concatenate([self.rows, more.rows]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnmaskingSteps) and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of_tokens(cls, rows: list[Any], block: int) -> UnmaskingSteps:
        """Of rows [1 + B] each; none is an empty one."""
        return cls(np.stack(rows).astype(np.int32) if rows else np.empty((0, 1 + block), np.int32))


@dataclass(frozen=True, slots=True)
class UnmaskedAnswers:
    """Those of one micro-batch: of each its steps, the tokens before its first one, and its own."""

    steps: list[UnmaskingSteps]
    prompts: list[np.ndarray]
    answers: list[np.ndarray]
