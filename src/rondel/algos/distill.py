"""Learning from a teacher on the policy's own samples: every token pays for what the teacher would
hardly have written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.bounds import check_weight
from rondel.algos.component import Component
from rondel.algos.discount import discounted_returns
from rondel.algos.divergence import Divergence
from rondel.algos.scored_samples import ScoredSamples, over_group
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import TokenBatch, bounded_exp
from rondel.core.errors import ConfigError


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

    def shape_advantages(self, advantages_T: Tensor, scored: ScoredSamples) -> Tensor:
        """The advantage of each token after what its teacher says of it.  [T] -> [T]."""
        return advantages_T - self.charge(scored).to(advantages_T.dtype)

    def charge(self, scored: ScoredSamples) -> Tensor:
        """What is taken off the advantage of each token.  -> [T]."""
        assert scored.behavior_T is not None and scored.teacher_T is not None
        return self(scored.behavior_T, scored.teacher_T)

    def __str__(self) -> str:
        return f"{self.coef:g}·(logp_behavior - logp_teacher); A - d takes the place of A"


@dataclass(frozen=True)
class EarlyDistill(Distill):
    """A_t' = A_t - coef·w_t·d_t, d_t = log pi_behavior - log pi_teacher, w_t = 1 + gamma·(1 - sum over s < t of |d_s|
    / sum over the sample).  [T], [T] -> [T].  arXiv:2606.22600 (IW-OPD).

    The first tokens that the teacher would not have written weigh 1 + gamma, and what follows them less: where the
    policy has already left the teacher's ways, the teacher's opinion is about contexts it would not have come to.

    coef     what a nat between policy and teacher costs; 0 leaves the teacher out
    gamma    how much more the first tokens count
    """

    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma >= 0:
            raise ConfigError(f"gamma = {self.gamma}; it must not be negative: early tokens would count less")

    def charge(self, scored: ScoredSamples) -> Tensor:
        cost_T = super().charge(scored)
        if not len(cost_T):
            return cost_T
        apart_T, sample_T = cost_T.abs(), scored.sample_T
        left_T = discounted_returns(apart_T, sample_T, gamma=1.0)  # |d| of the token and of those behind it
        return (1 + self.gamma * left_T / over_group(apart_T, sample_T, "sum").clamp(min=1e-12)) * cost_T

    def __str__(self) -> str:
        return (
            f"{self.coef:g}·w·(logp_behavior - logp_teacher), w from {1 + self.gamma:g} down to 1 as they add up; "
            "A - d takes the place of A"
        )


@dataclass(frozen=True)
class ScaledAdvantage(Distill):
    """A_t' = A_t·(1 - coef + coef·clip(exp(sign(A_t)·g_t), 1 - clip, 1 + clip)),
    g_t = log pi_teacher - log pi_behavior.  [T] -> [T].  arXiv:2604.03128 (RLSD).

    The reward says which way a token goes, the teacher only how far: a good answer's tokens count more where the
    teacher finds them likelier, a bad one's where it finds them less likely. The factor is positive, so no sign ever
    turns, and what the teacher knows of the answer cannot be learned as such.

    coef     from 0, the plain advantage, to 1, all of the teacher's factor
    clip     how far the factor may be from 1
    only_negative    leave advantages above 0 as they are
    """

    coef: float = 0.5
    clip: float = 0.2
    only_negative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.coef <= 1:
            raise ConfigError(f"coef = {self.coef}; it must lie in [0, 1]: a share of the teacher's factor")
        if not 0 < self.clip < 1:
            raise ConfigError(f"clip = {self.clip}; it must lie in (0, 1): the factor must move, and stay positive")

    def shape_advantages(self, advantages_T: Tensor, scored: ScoredSamples) -> Tensor:
        assert scored.behavior_T is not None and scored.teacher_T is not None
        gap_T = (scored.teacher_T - scored.behavior_T).to(advantages_T.dtype)
        factor_T = bounded_exp(advantages_T.sign() * gap_T).clamp(1 - self.clip, 1 + self.clip)
        if self.only_negative:
            factor_T = torch.where(advantages_T < 0, factor_T, 1.0)
        return advantages_T * (1 - self.coef + self.coef * factor_T)

    def __str__(self) -> str:
        where = " where A < 0" * self.only_negative
        return (
            f"clip(exp(sign(A)·(logp_teacher - logp_behavior)), {1 - self.clip:g}, {1 + self.clip:g}); "
            f"A·({1 - self.coef:g} + {self.coef:g}·d) takes the place of A{where}"
        )


@dataclass(frozen=True)
class GatedDistill(Component):
    """d_t = g_t·(log pi_teacher - log pi), g_t = sigmoid(beta·(log pi_teacher - log pi)) without gradient, in the
    loss.  [T], [T] -> [T].  arXiv:2605.15155 (SDAR).

    A likelihood of the drawn tokens, weighed by how much likelier the teacher finds them: what it would hardly have
    written is left alone, neither learned nor unlearned. The advantage stays what it is.

    coef    weight beside the surrogate; 0 leaves the teacher out
    beta    how sharply a token is let through
    """

    coef: float = 0.1
    beta: float = 5.0
    charged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_weight("coef", self.coef, "the teacher")
        if not self.beta >= 0:
            raise ConfigError(f"beta = {self.beta}; it must not be negative: what the teacher rejects would be learned")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_logprobs"}) if self.coef else frozenset()

    def term(self, batch: TokenBatch) -> Tensor:
        """d, with its gradient.  -> [T]."""
        assert batch.logprobs is not None and batch.teacher is not None, "no teacher has said what it thinks"
        gap_T = batch.teacher - batch.logprobs
        return torch.sigmoid(self.beta * gap_T.detach()) * gap_T

    def __str__(self) -> str:
        return f"sigmoid({self.beta:g}·(logp_teacher - logp))·(logp_teacher - logp), no gradient through the sigmoid"


@dataclass(frozen=True)
class Observations(Component):
    """d = mean of -log pi over the tokens that the policy only read after it began to write, in the loss.  prime-rl's
    ECHO.

    The environment is the teacher: the policy learns to foresee what its tools will say. They are read anyway, but
    learned in a pass of their own, which costs as much again. The mean is over all such tokens of the update; the
    markers of a turn count as what stands in it. Pictures are left out, and the prompt is not learned.

    coef    weight of that mean beside the row's own loss; 0 leaves it out
    """

    coef: float = 0.1
    charged: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_weight("coef", self.coef, "what its tools say")

    def __str__(self) -> str:
        return "mean of -logp over the tokens that it only read after it began to write"


@dataclass(frozen=True)
class FullDistill(Component):
    """d_t = sum_v p(v)·(log p(v) - log q(v)) over the whole vocabulary, in the loss and not in the
    advantage.  arXiv:2306.13649 (GKD).

    Its gradient at a context is exact where `Distill` estimates it from one token: no variance of the draw, at the
    price of the teacher's distribution at every token, which is rebuilt from its last hidden states. Several teachers:
    sum_i w_i·KL(p || q_i) / sum_i w_i, of which log q = sum_i w_i·log q_i / sum_i w_i has the same gradient. With
    `beta` below 1 it is a Jensen-Shannon divergence, at 0 the forward KL, which asks the policy to cover all that the
    teacher would write. With `top` only the policy's likeliest tokens are compared, and all others as one where `tail`
    is true.

    coef    what a nat between policy and teacher costs; 0 leaves the teacher out
    beta    1 KL(policy || teacher), 0 KL(teacher || policy), between them the divergence from (1 - beta)·p + beta·q
    top     how many of the policy's likeliest tokens; 0 is all
    tail    all other tokens are one more; false leaves them out and lets the others add up to 1
    """

    coef: float = 1.0
    beta: float = 1.0
    top: int = 0
    tail: bool = True
    charged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_weight("coef", self.coef, "the teacher")
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta = {self.beta}; it must lie in [0, 1]: a share of the teacher in the mixture")
        if not (self.top == 0 or self.top >= 2 or (self.top == 1 and self.tail)):
            raise ConfigError(
                f"top = {self.top}; it must be 0 for all, or at least 2: one token alone is always certain"
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_hidden"}) if self.coef else frozenset()

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.top else {"tail": "distill.top is 0"}

    @property
    def divergence(self) -> Divergence:
        return Divergence(self.beta, self.top, self.tail)

    def __str__(self) -> str:
        return f"{self.divergence} of the token's whole distribution" if not self.top else f"{self.divergence}"
