"""Surrogates for tokens that another policy drew: they weigh by pi / pi_behavior
themselves, so no correction stands beside them.

u_t = pi(t) / pi_behavior(t), without gradient. Their contract is in `surrogate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rondel.algos.component import Component
from rondel.algos.scored_samples import over_group
from rondel.algos.surrogate import Clip, Surrogate
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import LIMIT, Tokens, bounded_exp
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

READS = frozenset({"advantage", "behavior"})
LEAST = 1e-6  # of a probability outside a head of the vocabulary; less is rounding
TINY = 1e-30  # in the place of 0 in a denominator


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
    scales_advantage: ClassVar[bool] = True
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
    scales_advantage: ClassVar[bool] = True
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
    scales_advantage: ClassVar[bool] = True
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
    scales_advantage: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"guidance"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma > 0:
            raise ConfigError(f"gamma = {self.gamma}; it must be positive, or demonstrations would have no gradient")

    def refuse_beside(self, parts: Mapping[str, Any]) -> None:
        """Nobody drew a demonstration, at no version: nothing may read a log-probability of 0 as one that was drawn."""
        kl = parts["kl"]
        beside = {
            f"kl.where = '{kl.where}'": kl.in_reward or kl.in_advantage,
            "kl.target": kl.is_adaptive,
            "advantage": "behavior_logprobs" in parts["advantage"].needs,
            "distill": "behavior_logprobs" in parts["distill"].needs,
            "correction": "ages" in parts["correction"].needs,
            "terms": any(term.needs & {"behavior_logprobs", "ages"} for term in parts["terms"]),
        }
        if found := next((name for name, given in beside.items() if given), None):
            raise ConfigError(
                f"algo.{found} beside surrogate.kind = 'guided': it reads with which probability, or when, a token was "
                "drawn, and nobody drew the tokens of a demonstration. Leave it out (a KL: kl.where = 'loss', without a "
                "target), or learn the demonstrations beside the samples: algo.beside"
            )

    def __call__(self, tokens: Tokens) -> Surrogate:
        own, pi_T = super().__call__(tokens), tokens.logprobs.exp()
        loss_T = torch.where(tokens.guided, -pi_T / (pi_T + self.gamma) * tokens.advantages, own.loss_T)
        return Surrogate(loss_T, own.clipped_T & ~tokens.guided)

    def __str__(self) -> str:
        return f"{super().__str__()}; -pi/(pi + {self.gamma:g})·A for a demonstrated token"


@dataclass(frozen=True)
class CenteredScore(Component):
    """l = -A·(w·log p - C), w = clip(p/q, low, high) without gradient, C = sum over H of c_v·log p_v, without gradient
    through c.  [T], [T, K] -> [T].  arXiv:2609.20807 (score centering).

    The gradient of C is the mean of the score that w weighs, sum over v of q_v·w_v·s_v. Without it a reward that is
    the same for every token moves a policy that differs from the behavior, step after step in the same direction; with
    it that mean is 0. H are the `top` tokens that were likeliest when the token was drawn, and outside q_v is taken as
    rho·p_v, rho = (1 - q(H)) / (1 - p(H)): since sum p_v·s_v = 0, c_v = clip(p_v, low·q_v, high·q_v) - alpha·p_v with
    alpha = clip(1, low·rho, high·rho). Exact where H is the whole vocabulary, or the tails have one shape. low = high =
    1 weighs nothing: centering alone. Open bounds weigh by p/q, whose mean score is 0 already: then C is 0.

    low     the smallest weight of a token
    high    the largest weight of a token
    top     how many of the likeliest tokens are recorded at each draw
    """

    low: float = 1.0
    high: float = 1.0
    top: int = 20
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs", "behavior_top"})
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = READS
    push: ClassVar[str] = "A·∇C"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ConfigError(
                f"low = {self.low}, high = {self.high}; 1 must lie between them: the weight of an on-policy token"
            )
        if not self.top >= 1:
            raise ConfigError(f"top = {self.top}; it must be at least 1: how many tokens are recorded at each draw")

    @property
    def slope(self) -> str:
        return "-A" if self.low == self.high == 1 else f"-min(max(u, {self.low:g}), {self.high:g})·A"

    @property
    def behavior_top(self) -> int:
        return self.top

    def __call__(self, tokens: Tokens) -> Surrogate:
        assert tokens.top_logprobs is not None and tokens.top_behavior is not None, "no head of the vocabulary is known"
        weight_T = bounded_exp(tokens.log_drift).clamp(self.low, self.high)
        mean_T = (self.coefs(tokens.top_logprobs.detach(), tokens.top_behavior) * tokens.top_logprobs).sum(-1)
        score_T = weight_T * tokens.logprobs - torch.where(tokens.guided, 0.0, mean_T)
        return Surrogate(-tokens.advantages * score_T, torch.zeros_like(tokens.guided))

    def coefs(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """c_v.  [T, K], [T, K] -> [T, K]; 0 where log q is -inf, for what fills up a row."""
        log_q = log_q.to(log_p.dtype)
        q, p = log_q.exp(), torch.where(log_q > -torch.inf, log_p.exp(), 0.0)
        outside_q, outside_p = (1 - x.sum(-1, keepdim=True) for x in (q, p))
        rho = torch.where(outside_q > LEAST, outside_q / outside_p.clamp(min=LEAST), TINY)
        alpha = rho * (1 / rho).clamp(self.low, self.high)
        return torch.where(q > 0, q * (p / q.clamp(min=TINY)).clamp(self.low, self.high), 0.0) - alpha * p

    def __str__(self) -> str:
        w = "" if self.low == self.high == 1 else "w·"
        weight = "" if not w else f", w = policy / behavior in [{self.low:g}, {self.high:g}]"
        return (
            f"-A·({w}logp - C){weight}, ∇C = mean of {w}∇logp over the behavior's draws, from the {self.top} likeliest"
        )
