"""How a critic learns what to expect: its loss, and how well it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rondel.algos.component import Component
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


class ValueTerms(NamedTuple):
    """loss_T [T] to be minimised; clipped_T [T] bool, the tokens that pass no gradient because the bound held them."""

    loss_T: Tensor
    clipped_T: Tensor


@dataclass(frozen=True)
class ClippedValue(Component):
    """l = max((v - G)², (clip(v, v_old ± clip) - G)²) / 2.  [T], [T], [T] -> [T], [T].
    arXiv:1707.06347's code; arXiv:2005.12729.

    G are the returns and v_old the values with which they were made. At v = v_old it is
    the squared error, whatever the bound.

    clip    how far a value may move in one step; None lets it
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip = {self.clip}; it must be positive, or the critic would never move")

    def __call__(self, values_T: Tensor, old_T: Tensor, returns_T: Tensor) -> ValueTerms:
        free_T = (values_T - returns_T).square()
        if self.clip is None:
            return ValueTerms(free_T / 2, torch.zeros_like(free_T, dtype=torch.bool))
        held_T = (values_T.clamp(old_T - self.clip, old_T + self.clip) - returns_T).square()
        return ValueTerms(torch.maximum(free_T, held_T) / 2, held_T > free_T)

    def __str__(self) -> str:
        return "(v - G)²/2" if self.clip is None else f"max((v - G)², (clip(v, v_old ± {self.clip:g}) - G)²)/2"


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float | None:
    """1 - var(G - v) / var(G).  [T], [T] -> 1 for a critic that knows, 0 for one that says
    a constant.  None where G does not vary.
    """
    if len(returns_T) < 2 or not bool((spread := returns_T.double().var()) > 0):
        return None
    return float(1 - (returns_T.double() - values_T.double()).var() / spread)
