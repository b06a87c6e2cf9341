"""Learning from a teacher on the policy's own samples: every token pays for what the teacher would hardly have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rondel.words.errors import ConfigError


@dataclass(frozen=True)
class Distill:
    """A_t' = A_t - coef·(log pi_behavior - log pi_teacher).  [T], [T] -> [T].  arXiv:2306.08543 (MiniLLM); Thinking Machines 2025.

    On-policy, its policy gradient is that of -coef·KL(policy || teacher) at the contexts of the samples, each token blamed for itself
    alone. No reward is needed; where there is one, both add up. A sequence's later tokens are not charged to earlier ones.

    coef    what a nat between policy and teacher costs; 0 leaves the teacher out
    """

    coef: float = 0.0
    asks: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs", "teacher_logprobs"})

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ConfigError(f"coef = {self.coef}; it must not be negative: that would drive the policy away from the teacher")

    @property
    def needs(self) -> frozenset[str]:
        return self.asks if self.coef else frozenset()

    def __call__(self, behavior_T: Tensor, teacher_T: Tensor) -> Tensor:
        return self.coef * (behavior_T - teacher_T)

    def __str__(self) -> str:
        return f"{self.coef:g}·(logp_behavior - logp_teacher); A - d takes the place of A"
