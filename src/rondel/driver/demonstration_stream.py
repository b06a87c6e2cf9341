"""Demonstrations that are trained beside what the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rondel.core.types import (
    Task,
)

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm


@dataclass(frozen=True)
class DemonstrationStream:
    """Demonstrations beside the samples of every step."""

    stream: str
    tasks: list[Task]
    row: Algorithm
    weight: float
    groups: int  # a step
    suffix: str
    examples: list[dict[str, str]]
