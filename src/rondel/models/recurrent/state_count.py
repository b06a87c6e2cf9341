"""What the states of one sequence take, counted while a model runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from rondel.models.recurrent.layout import SegmentStates, StateRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rondel.core.row_split import RowSegment


class StateCount(SegmentStates):
    """States of a packed row, with the layers that asked and the bytes of one sequence's states."""

    def __init__(self, segments: Sequence[RowSegment], device: torch.device | str) -> None:
        super().__init__(segments, device)
        self.bytes = 0
        self._asked: list[tuple[int, str]] = []  # (layer, which of its states)

    @property
    def layers(self) -> list[int]:
        """Layers that asked; one that asked twice for the same state stands here twice."""
        once = {layer for layer, _ in self._asked}
        again = {layer for i, (layer, name) in enumerate(self._asked) if (layer, name) in self._asked[:i]}
        return sorted([*once, *again])

    def scan(self, layer: int, rule: StateRule, *inputs: Tensor) -> Tensor:
        self._asked.append((layer, rule.name))
        self.bytes += math.prod(rule.state_shape) * rule.state_dtype.itemsize
        return super().scan(layer, rule, *inputs)
