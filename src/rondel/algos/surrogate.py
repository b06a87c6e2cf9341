"""The function of one token whose gradient is the policy's. `reads` names the parts of the row it takes numbers from; `slope` is
the factor of ∇logp at ratio 1, as text for `explain`.

T trainable tokens · logprobs_T carries the gradient · log_ratio_T is log pi - log pi_proximal · advantages_T is each token's A
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rondel.algos.ratio import LIMIT, bounded_exp
from rondel.words.errors import ConfigError


class Surrogate(NamedTuple):
    """loss_T [T] to be minimised; clipped_T [T] bool, the tokens that pass no gradient because a bound held them."""

    loss_T: Tensor
    clipped_T: Tensor


@dataclass(frozen=True)
class Clip:
    """l = max(-r·A, -clip(r, 1-low, 1+high)·A); with `dual`, for A < 0: min(l, -dual·A).  [T], [T], [T] -> [T], [T].

    arXiv:1707.06347 (PPO); arXiv:2503.14476 (high > low); arXiv:1912.09729 (dual). log r is clamped to ±20.
    At r = 1 it is the policy gradient, whatever the bounds.

    low     a ratio below 1 - low passes no gradient when A < 0
    high    a ratio above 1 + high passes no gradient when A > 0
    dual    a ratio above this passes no gradient when A < 0 either; None leaves that side open
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    reads: ClassVar[frozenset[str]] = frozenset({"advantage", "ratio"})
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ConfigError(f"low = {self.low}; it must lie in [0, 1]: the ratio is positive")
        if not self.high >= 0:
            raise ConfigError(f"high = {self.high}; it must not be negative: the ratio starts at 1")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"dual = {self.dual}; it must be above 1, or on-policy tokens would lose their gradient")

    def __call__(self, logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor) -> Surrogate:
        ratio_T = bounded_exp(log_ratio_T)
        free_T = -ratio_T * advantages_T
        loss_T = torch.maximum(free_T, -ratio_T.clamp(1 - self.low, 1 + self.high) * advantages_T)
        if self.dual is not None:
            loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, -self.dual * advantages_T), loss_T)
        return Surrogate(loss_T, (loss_T != free_T) | (log_ratio_T.abs() > LIMIT))

    def __str__(self) -> str:
        text = f"max(-r·A, -clip(r, {1 - self.low:g}, {1 + self.high:g})·A)"
        return text if self.dual is None else f"{text}, at most {-self.dual:g}·A where A < 0"


@dataclass(frozen=True)
class PolicyGradient:
    """l = -A·logp.  [T], [T], [T] -> [T], [T].  Williams 1992.  Right for the first update on a batch; nothing holds the later ones."""

    reads: ClassVar[frozenset[str]] = frozenset({"advantage"})
    slope: ClassVar[str] = "-A"

    def __call__(self, logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor) -> Surrogate:
        return Surrogate(-advantages_T * logprobs_T, torch.zeros_like(logprobs_T, dtype=torch.bool))

    def __str__(self) -> str:
        return "-A·logp"


@dataclass(frozen=True)
class LogLikelihood:
    """l = -logp.  [T], [T], [T] -> [T], [T].  Maximum likelihood (sft).  Every token is right; advantages are not read and may be None."""

    reads: ClassVar[frozenset[str]] = frozenset()
    slope: ClassVar[str] = "-1"

    def __call__(self, logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor | None) -> Surrogate:
        return Surrogate(-logprobs_T, torch.zeros_like(logprobs_T, dtype=torch.bool))

    def __str__(self) -> str:
        return "-logp"
