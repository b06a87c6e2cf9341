"""Surrogates for tokens that another policy drew: they weigh by pi / pi_behavior
themselves, so no correction stands beside them.

u_t = pi(t) / pi_behavior(t), without gradient. Their contract is in `surrogate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.exponent import LIMIT, bounded_exp
from rondel.algos.scored_samples import over_group
from rondel.algos.surrogate import Clip, Surrogate
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import Tokens
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

READS = frozenset({"advantage", "behavior"})


@dataclass(frozen=True)
class Tapered(Component):
    """l = -A·logp where score > above, else -min(u, 1)·A·logp; u of the token, or the product
    over its trajectory.  arXiv:2503.14286 (TOPR).

    Good answers are learned whoever wrote them; bad ones only as far as the policy would
    still write them, so they cannot be pushed down for ever. The paper's u is the trajectory's.

    level    trajectory or token
    above    the reward that a good answer exceeds
    """

    level: str = "trajectory"
    above: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-(1 if good else min(u, 1))·A"

    def __post_init__(self) -> None:
        one_of("level", self.level, ("trajectory", "token"))

    def __call__(self, tokens: Tokens) -> Surrogate:
        drift_T = over_group(tokens.log_drift, tokens.sample, "sum") if self.level == "trajectory" else tokens.log_drift
        weight_T = torch.where(tokens.score > self.above, 1.0, bounded_exp(drift_T).clamp(max=1))
        return Surrogate(-weight_T * tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        return (
            f"-A·logp where reward > {self.above:g}, else -min(u, 1)·A·logp, u = policy / behavior of the {self.level}"
        )


@dataclass(frozen=True)
class CappedWeight(Component):
    """l = -min(u, cap)·A·logp.  arXiv:2505.24034 (AIPO).  One ratio from the behavior to the
    policy, capped above and without a clip below.

    cap    the largest weight of a token; the paper uses 2 to 10
    """

    cap: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-min(u, cap)·A"

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise ConfigError(f"cap = {self.cap}; it must be at least 1, or on-policy tokens would be scaled down")

    def __call__(self, tokens: Tokens) -> Surrogate:
        weight_T = bounded_exp(tokens.log_drift).clamp(max=self.cap)
        return Surrogate(-weight_T * tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        return f"-min(u, {self.cap:g})·A·logp, u = policy / behavior of the token"


@dataclass(frozen=True)
class SecondMoment(Component):
    """l = -u·A on the tokens that remain after those of largest (log pi_proximal - log
    pi_behavior)² are dropped, until their mean is at most
    `threshold`; 0 on the dropped.  arXiv:2510.01161 (M2PO).

    The second moment, unlike a mean, cannot cancel, and unlike a ratio's variance is not
    ruled by one token: very stale batches keep all but their outliers. Nothing holds later updates
    of the same step. The gradient passes through u.

    threshold    the second moment that the remaining tokens may have
    """

    threshold: float = 0.04
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs", "proximal_logprobs"})
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-u·A where kept, else 0"

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(
                f"threshold = {self.threshold}; it must be positive, or every stale token would be dropped"
            )

    def select(self, tokens: Tokens) -> Tensor:
        """The tokens that are kept; ties go together."""
        moment_T = tokens.log_weight.square()
        ordered_T = moment_T.sort().values
        means_T = ordered_T.cumsum(0) / torch.arange(1, len(ordered_T) + 1, device=ordered_T.device)
        beyond = int((means_T > self.threshold).int().argmax()) if bool((means_T > self.threshold).any()) else None
        return torch.ones_like(tokens.guided) if beyond is None else moment_T < ordered_T[beyond]

    def __call__(self, tokens: Tokens) -> Surrogate:
        log_u_T = tokens.log_drift + tokens.logprobs - tokens.logprobs.detach()
        loss_T = torch.where(tokens.selected, -bounded_exp(log_u_T) * tokens.advantages, 0.0)
        return Surrogate(loss_T, ~tokens.selected | (tokens.log_drift.abs() > LIMIT))

    def __str__(self) -> str:
        return (
            f"-u·A, u = policy / behavior of the token; 0 for the outliers without which the mean of (log u)² is at "
            f"most {self.threshold:g}"
        )


@dataclass(frozen=True)
class Guided(Clip):
    """l = -pi/(pi + gamma)·A for a token of a demonstration; for the policy's own,
    PPO's clip.  arXiv:2504.14945 (LUFFY).

    A demonstration has no behavior probability (it is taken as 1) and no clip. The
    gradient's weight gamma·pi/(pi + gamma)² is largest at pi = gamma: tokens that the
    policy finds unlikely still teach. Advantages
    compare demonstrations and samples together.

    low      a ratio below 1 - low passes no gradient when A < 0
    high     a ratio above 1 + high passes no gradient when A > 0
    dual     a ratio above this passes no gradient when A < 0 either; None leaves that side open
    gamma    the probability at which a demonstrated token weighs most
    """

    gamma: float = 0.1
    needs: ClassVar[frozenset[str]] = frozenset({"guidance"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma > 0:
            raise ConfigError(f"gamma = {self.gamma}; it must be positive, or demonstrations would have no gradient")

    def __call__(self, tokens: Tokens) -> Surrogate:
        own, pi_T = super().__call__(tokens), tokens.logprobs.exp()
        loss_T = torch.where(tokens.guided, -pi_T / (pi_T + self.gamma) * tokens.advantages, own.loss_T)
        return Surrogate(loss_T, own.clipped_T & ~tokens.guided)

    def __str__(self) -> str:
        return f"{super().__str__()}; -pi/(pi + {self.gamma:g})·A for a demonstrated token"
