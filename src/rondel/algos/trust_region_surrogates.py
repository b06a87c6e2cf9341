"""Surrogates that hold the policy near its anchor by other means than PPO's clip. Their contract
is in `surrogate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.bounds import check_weight
from rondel.algos.component import Component
from rondel.algos.divergence import binary_kl, binary_tv
from rondel.algos.scored_samples import over_group
from rondel.algos.surrogate import Surrogate, check_bounds
from rondel.algos.tensors import torch
from rondel.algos.tokens import LIMIT, Tokens, bounded_exp
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

READS = frozenset({"advantage", "ratio"})


@dataclass(frozen=True)
class ClippedWeight(Component):
    """l = -sg(clip(r, 1-low, 1+high))·A·logp.  arXiv:2506.13585 (CISPO).  The bound of
    ScaleRL, arXiv:2510.13786: r at most 5.

    A clipped token keeps its gradient, with a bounded weight; so no token is silenced, and
    nothing holds the policy at the bound either.

    low     the weight is at least 1 - low; 1 leaves that side open
    high    the weight is at most 1 + high
    """

    low: float = 1.0
    high: float = 4.0
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)

    def __call__(self, tokens: Tokens) -> Surrogate:
        ratio_T = bounded_exp(tokens.log_ratio.detach())
        weight_T = ratio_T.clamp(1 - self.low, 1 + self.high)
        return Surrogate(-weight_T * tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        return f"-clip(r, {1 - self.low:g}, {1 + self.high:g})·A·logp, no gradient through r"


@dataclass(frozen=True)
class SoftGate(Component):
    """l = -4/tau·sigmoid(tau·(r - 1))·A, tau = positive where A > 0, else negative.  arXiv:2511.20347 (SAPO).

    The weight of a token fades smoothly with its distance from r = 1, where it is the
    policy gradient; faster for A < 0.

    positive    temperature for A > 0
    negative    temperature for A <= 0
    """

    positive: float = 1.0
    negative: float = 1.05
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        if not (self.positive > 0 and self.negative > 0):
            raise ConfigError(f"positive = {self.positive}, negative = {self.negative}; temperatures must be positive")

    def __call__(self, tokens: Tokens) -> Surrogate:
        tau_T = torch.full_like(tokens.advantages, self.negative).masked_fill(tokens.advantages > 0, self.positive)
        gate_T = 4 / tau_T * torch.sigmoid(tau_T * (bounded_exp(tokens.log_ratio) - 1))
        return Surrogate(-gate_T * tokens.advantages, tokens.log_ratio.abs() > LIMIT)

    def __str__(self) -> str:
        return f"-4/tau·sigmoid(tau·(r - 1))·A, tau = {self.positive:g} where A > 0, else {self.negative:g}"


@dataclass(frozen=True)
class GeometricMean(Component):
    """l = -A·exp(mean over the sample of x), x = min(log r, high) where A > 0, max(log r,
    -low) where A < 0.  arXiv:2507.20673 (GMPO).

    The geometric mean of the clipped token ratios: one outlier cannot carry a sample. Assumes one advantage a sample.

    low     a log-ratio below -low passes no gradient when A < 0
    high    a log-ratio above high passes no gradient when A > 0
    """

    low: float = 0.4
    high: float = 0.4
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ConfigError(f"low = {self.low}, high = {self.high}; neither may be negative: log-ratios start at 0")

    def __call__(self, tokens: Tokens) -> Surrogate:
        x_T, a_T = tokens.log_ratio, tokens.advantages
        held_T = torch.where(a_T > 0, x_T.clamp(max=self.high), torch.where(a_T < 0, x_T.clamp(min=-self.low), x_T))
        mean_T = over_group(held_T, tokens.sample, "mean")
        return Surrogate(-a_T * bounded_exp(mean_T), (held_T != x_T) | (mean_T.abs() > LIMIT))

    def __str__(self) -> str:
        return (
            f"-A·exp(mean over the sample of log r, at most {self.high:g} where A > 0, "
            f"at least {-self.low:g} where A < 0)"
        )


@dataclass(frozen=True)
class DivergenceMask(Component):
    """l = -r·A·m, m = 0 where (A > 0, r > 1, D > high) or (A < 0, r < 1, D > low), else 1.  arXiv:2602.04879 (DPPO).

    D compares this token against all others taken together: tv |p - q|, or kl q·log(q/p) +
    (1-q)·log((1-q)/(1-p)), with p the policy and q its anchor. A ratio of 2 on a token of
    probability 0.001 is no distance, on one
    of 0.4 it is. It needs the token ratio. The paper anchors at the behavior, and sets 0.15
    for tv, 0.05 for kl. With `cap` a larger r
    weighs cap, and the token keeps its gradient.

    divergence    tv, the total variation, or kl
    low           the divergence beyond which a token of A < 0 is not pushed down further
    high          the divergence beyond which a token of A > 0 is not pushed up further
    cap           the largest weight r; None leaves it open
    """

    divergence: str = "tv"
    low: float = 0.15
    high: float = 0.15
    cap: float | None = None
    token_ratio: ClassVar[bool] = True
    probability: ClassVar[bool] = True
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        one_of("divergence", self.divergence, ("tv", "kl"))
        if not (self.low >= 0 and self.high >= 0):
            raise ConfigError(f"low = {self.low}, high = {self.high}; neither may be negative: a divergence is not")
        if self.cap is not None and not self.cap >= 1:
            raise ConfigError(f"cap = {self.cap}; it must be at least 1, or on-policy tokens would be scaled down")

    def __call__(self, tokens: Tokens) -> Surrogate:
        x_T, a_T, now_T = tokens.log_ratio, tokens.advantages, tokens.logprobs.detach()
        apart_T = (binary_tv if self.divergence == "tv" else binary_kl)(now_T, now_T - x_T.detach())
        left_T = ((a_T > 0) & (x_T > 0) & (apart_T > self.high)) | ((a_T < 0) & (x_T < 0) & (apart_T > self.low))
        weight_T = bounded_exp(x_T)
        if self.cap is not None:  # the value of min(r, cap), and as much of the gradient of logp
            weight_T = weight_T.clamp(max=self.cap).detach() * (1 + x_T - x_T.detach())
        passes_none_T = left_T | (x_T.abs() > LIMIT) if self.cap is None else left_T
        return Surrogate(torch.where(left_T, 0.0, -weight_T * a_T), passes_none_T)

    def __str__(self) -> str:
        return (
            f"-{'r' if self.cap is None else f'min(r, {self.cap:g})'}·A, 0 where r has left 1 in the direction of "
            f"A by a binary {self.divergence} above {self.high:g} (up), {self.low:g} (down)"
        )


@dataclass(frozen=True)
class MirrorDescent(Component):
    """l = -A·logp + tau/2·x², x = log pi - log pi_anchor: of the token, or of the sample and spread
    over its tokens.  arXiv:2501.12599 (Kimi k1.5).

    The square is what keeps the policy near the anchor; there is no ratio and no clip. The
    paper's x is the sample's, and its A the reward less the group's mean. A sample's square
    S² is shared out as S·x_t: right for every
    aggregate that weighs the tokens of a sample alike.

    tau      weight of the square; the paper gives no number
    level    sequence, or token: arXiv:2405.19107 (DRO) on tokens
    """

    tau: float = 0.1
    level: str = "sequence"
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        one_of("level", self.level, ("sequence", "token"))
        check_weight("tau", self.tau, "its anchor")

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.tau else {"level": "surrogate.tau is 0"}

    def __call__(self, tokens: Tokens) -> Surrogate:
        x_T = tokens.log_ratio
        whole_T = over_group(x_T, tokens.sample, "sum") if self.level == "sequence" else x_T
        return Surrogate(
            -tokens.advantages * tokens.logprobs + self.tau / 2 * whole_T * x_T, torch.zeros_like(tokens.guided)
        )

    def __str__(self) -> str:
        return f"-A·logp + {self.tau / 2:g}·(log r{' summed over the sample' if self.level == 'sequence' else ''})²"
