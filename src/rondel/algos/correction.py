"""The weight of a token that another policy drew: proximal / behavior. It scales the surrogate and never a denominator.

T trainable tokens · log_weight_T = log pi_proximal - log pi_behavior. The weights carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rondel.algos.ratio import bounded_exp
from rondel.words.errors import ConfigError


@dataclass(frozen=True)
class NoCorrection:
    """c_t = 1.  [T], [T], [T] -> [T].  Right when the tokens were drawn from the proximal policy."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, log_weight_T: Tensor, sample_T: Tensor, advantages_T: Tensor) -> Tensor:
        return torch.ones_like(log_weight_T)

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class TokenTIS:
    """c_t = min(pi_proximal / pi_behavior, cap).  [T], [T], [T] -> [T].  arXiv:2110.00641 (decoupled); Yao et al. 2025 (truncated).

    The cap adds bias and buys variance. A token's weight ignores the tokens before it.

    cap    the largest weight a token may get
    """

    cap: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise ConfigError(f"cap = {self.cap}; it must be at least 1, or on-policy tokens would be scaled down")

    def __call__(self, log_weight_T: Tensor, sample_T: Tensor, advantages_T: Tensor) -> Tensor:
        return bounded_exp(log_weight_T.detach()).clamp(max=self.cap)

    def __str__(self) -> str:
        return f"min(exp(logp_proximal - logp_behavior), {self.cap:g}), no gradient"
