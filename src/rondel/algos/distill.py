"""Learning from a teacher on the policy's own samples: every token pays for what the teacher would
hardly have written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component, check_weight
from rondel.algos.tensors import Tensor


@dataclass(frozen=True)
class Distill(Component):
    """A_t' = A_t - coef·(log pi_behavior - log pi_teacher).  [T], [T] -> [T].
    arXiv:2306.08543 (MiniLLM); Thinking Machines 2025.

    On-policy, its policy gradient is that of -coef·KL(policy || teacher) at the contexts of
    the samples, each token blamed for itself alone. No reward is needed; where there is
    one, both add up. A sequence's later
    tokens are not charged to earlier ones.

    coef    what a nat between policy and teacher costs; 0 leaves the teacher out
    """

    coef: float = 0.0
    asks: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs", "teacher_logprobs"})

    def __post_init__(self) -> None:
        check_weight("coef", self.coef, "the teacher")

    @property
    def needs(self) -> frozenset[str]:
        return self.asks if self.coef else frozenset()

    @property
    def charged(self) -> bool:
        """Whether it is part of the advantage."""
        return self.coef > 0

    def __call__(self, behavior_T: Tensor, teacher_T: Tensor) -> Tensor:
        return self.coef * (behavior_T - teacher_T)

    def __str__(self) -> str:
        return f"{self.coef:g}·(logp_behavior - logp_teacher); A - d takes the place of A"


@dataclass(frozen=True)
class FullDistill(Component):
    """d_t = sum_v p(v)·(log p(v) - log q(v)) over the whole vocabulary, in the loss and not in the
    advantage.  arXiv:2306.13649 (GKD, reverse KL).

    Its gradient at a context is exact where `Distill` estimates it from one token: no variance
    of the draw, at the price of the teacher's distribution at every token, which is rebuilt
    from its last hidden states. Several teachers:
    sum_i w_i·KL(p || q_i) / sum_i w_i, of which log q = sum_i w_i·log q_i / sum_i w_i has the same gradient.

    coef    what a nat between policy and teacher costs; 0 leaves the teacher out
    """

    coef: float = 1.0
    charged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_weight("coef", self.coef, "the teacher")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_hidden"}) if self.coef else frozenset()

    def __str__(self) -> str:
        return "KL(policy || teacher) of the token's whole distribution"
