"""How far the policy has moved from its anchor since the batch was drawn (the ratio), and the function of one token
whose gradient is the policy's (the surrogate of it).

The anchor of a ratio is the proximal policy, which began the step: what lies between it and the behavior is the
correction's. Anchored at the behavior itself (bypass) the ratio spans both, and no correction is left to make. Anchored
at the reference it is how far the policy has come in all; it is then not 1 at the first update, and a clip would hold
the policy there.

A surrogate maps Tokens, [T] -> loss and clipped, [T]. `reads` names the parts of the row it takes numbers from; `slope`
is the factor of ∇logp at ratio 1, as text for `explain`. One that must compare the tokens of the whole update has
`select(tokens) -> [T] bool`. It is asked once, before the first move, with the proximal logprobs; the answer comes back
as `tokens.selected`, whatever micro-batch the token is in (law 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rondel.algos.component import Component
from rondel.algos.scored_samples import over_group
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import LIMIT, Tokens, bounded_exp
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

NEEDS = {
    "proximal": frozenset[str](),
    "behavior": frozenset({"behavior_logprobs"}),
    "reference": frozenset({"ref_logprobs"}),
}


@dataclass(frozen=True)
class TokenRatio(Component):
    """log r_t = log pi(t) - log pi_anchor(t).  [T], [T] -> [T].  arXiv:1707.06347.  Each token stands for itself.

    anchor    where the ratio starts: proximal, behavior (bypass), or reference
    """

    anchor: str = "proximal"

    def __post_init__(self) -> None:
        one_of("anchor", self.anchor, NEEDS)

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS[self.anchor]

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return log_ratio_T

    def __str__(self) -> str:
        return f"exp(logp - logp_{self.anchor}) of the token"


@dataclass(frozen=True)
class SequenceRatio(TokenRatio):
    """log r_t = mean over its sample of (log pi - log pi_anchor).  [T], [T] -> [T].  arXiv:2507.18071 (GSPO).

    A sample is clipped as a whole, and each of its tokens moves it by its share.

    anchor    where the ratio starts: proximal, behavior (bypass), or reference
    """

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return over_group(log_ratio_T, sample_T, "mean")

    def __str__(self) -> str:
        return f"exp(mean of logp - logp_{self.anchor} over the sample)"


@dataclass(frozen=True)
class SequenceTokenRatio(TokenRatio):
    """log r_t = mean over its sample, as a number, with the gradient of token t alone.  [T],
    [T] -> [T].  arXiv:2507.18071 (GSPO-token).

    The value of the sequence ratio; with one advantage a sample its gradient too. Made for
    advantages that differ within a sample.

    anchor    where the ratio starts: proximal, behavior (bypass), or reference
    """

    def __call__(self, log_ratio_T: Tensor, sample_T: Tensor) -> Tensor:
        return over_group(log_ratio_T.detach(), sample_T, "mean") + log_ratio_T - log_ratio_T.detach()

    def __str__(self) -> str:
        return f"exp(mean of logp - logp_{self.anchor} over the sample), the gradient that of the token"


class Surrogate(NamedTuple):
    """loss_T [T] to be minimised; clipped_T [T] bool, the tokens that pass no gradient because a bound held them."""

    loss_T: Tensor
    clipped_T: Tensor


def check_bounds(low: float, high: float) -> None:
    """A ratio is held to [1 - low, 1 + high]."""
    if not 0 <= low <= 1:
        raise ConfigError(f"low = {low}; it must lie in [0, 1]: the ratio is positive")
    if not high >= 0:
        raise ConfigError(f"high = {high}; it must not be negative: the ratio starts at 1")


@dataclass(frozen=True)
class Clip(Component):
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
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"advantage", "ratio"})
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high)
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"dual = {self.dual}; it must be above 1, or on-policy tokens would lose their gradient")

    def __call__(self, tokens: Tokens) -> Surrogate:
        a_T, ratio_T = tokens.advantages, bounded_exp(tokens.log_ratio)
        free_T = -ratio_T * a_T
        loss_T = torch.maximum(free_T, -ratio_T.clamp(1 - self.low, 1 + self.high) * a_T)
        if self.dual is not None:
            loss_T = torch.where(a_T < 0, torch.minimum(loss_T, -self.dual * a_T), loss_T)
        return Surrogate(loss_T, (loss_T != free_T) | (tokens.log_ratio.abs() > LIMIT))

    def __str__(self) -> str:
        text = f"max(-r·A, -clip(r, {1 - self.low:g}, {1 + self.high:g})·A)"
        return text if self.dual is None else f"{text}, at most {-self.dual:g}·A where A < 0"


@dataclass(frozen=True)
class PolicyGradient(Component):
    """l = -A·logp.  Williams 1992.  Right for the first update on a batch; nothing holds the later ones."""

    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"advantage"})
    slope: ClassVar[str] = "-A"

    def __call__(self, tokens: Tokens) -> Surrogate:
        return Surrogate(-tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        return "-A·logp"


@dataclass(frozen=True)
class LogLikelihood(Component):
    """l = -logp.  Maximum likelihood (sft).  Every token is right; advantages are not read."""

    reads: ClassVar[frozenset[str]] = frozenset()
    slope: ClassVar[str] = "-1"

    def __call__(self, tokens: Tokens) -> Surrogate:
        return Surrogate(-tokens.logprobs, torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        return "-logp"


@dataclass(frozen=True)
class WholeLikelihood(LogLikelihood):
    """l = -log pi(t) of the model itself, at temperature 1 over its whole vocabulary.  arXiv:2604.01193 (SSD).

    The tokens were drawn at another temperature, or from the likeliest of the vocabulary alone, and are learned as they
    are: the model comes to write plainly what it wrote under these settings. So it assumes that they improve what the
    model writes. Log-probabilities of the draw belong to another distribution and enter nowhere.
    """

    whole_distribution: ClassVar[bool] = True

    def refuse_beside(self, parts: Mapping[str, Any]) -> None:
        """No ratio, and nothing that compares with log-probabilities of the sampler's temperature."""
        beside = {
            "correction.kind": bool(parts["correction"].needs) or parts["correction"].weighs,
            "kl.coef": bool(parts["kl"].coef),
            "distill.coef": bool(parts["distill"].coef),
            "terms": any(term.needs for term in parts["terms"]),
        }
        if found := next((name for name, given in beside.items() if given), None):
            raise ConfigError(
                f"algo.{found} beside surrogate.kind = 'whole_likelihood': it compares log-probabilities of the "
                "distribution that tokens were drawn from, and this one learns the model's own at temperature 1. "
                f"Remove algo.{found.partition('.')[0]}, or use a row that learns from what was drawn (raft, opd, grpo)"
            )

    def __str__(self) -> str:
        return "-logp at temperature 1, over the whole vocabulary"
