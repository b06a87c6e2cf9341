"""Corrections that look at more of a token than its log-weight: at its probabilities, or at its age. Their contract is
in `correction.py`; what they look at comes with the tokens, so they answer `weights_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.divergence import binary_kl
from rondel.algos.scored_samples import over_group
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import Tokens, bounded_exp
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

DENOMINATORS = ("all", "kept")


class MaskCorrection(Component):
    """A correction of which what weighs 0 may leave the denominators: its knob `denominator`."""

    asks: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})

    @property
    def needs(self) -> frozenset[str]:
        return self.asks | ({"proximal_logprobs"} if self.denominator != "all" else set())

    def counts(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor:
        """The tokens that count in the denominators.  [T], [T], [T] -> [T] bool."""
        return weight_T != 0 if self.denominator == "kept" else torch.ones_like(weight_T, dtype=torch.bool)


@dataclass(frozen=True)
class BinaryKlMask(MaskCorrection):
    """c_t = proximal / behavior where both KLs of "this token or another" are at most phi, else 0.  [T] -> [T].

    ringtech.notion.site/kpop (KPop). Between p, of the proximal policy, and q, of the behavior: p·log(p/q) + (1-p)·
    log((1-p)/(1-q)) and the same with p and q exchanged. Wide in ratios for a rare token, tight for one that is nearly
    certain, and the same whichever of the two found it likelier.

    phi            nats; 0.1 in the text and in prime-rl, 2 unless set in AReaL
    denominator    all or kept: do masked tokens count in the denominators?
    """

    phi: float = 0.1
    denominator: str = "all"
    weighs: ClassVar[bool] = True
    probability: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("denominator", self.denominator, DENOMINATORS)
        if not self.phi > 0:
            raise ConfigError(f"phi = {self.phi}; it must be positive, or every token that differs would be dropped")

    def weights_of(self, tokens: Tokens) -> Tensor:
        before_T = tokens.logprobs.detach() - tokens.log_drift
        now_T = before_T + tokens.log_weight
        apart_T = torch.maximum(binary_kl(now_T, before_T), binary_kl(before_T, now_T))
        return torch.where(apart_T <= self.phi, bounded_exp(tokens.log_weight.detach()), 0.0)

    def __str__(self) -> str:
        return (
            "proximal / behavior, 0 where a binary KL between them, in either direction, "
            f"is above {self.phi:g}; no gradient"
        )


@dataclass(frozen=True)
class VariationMask(MaskCorrection):
    """c_t = 0 where the answer's mean of |proximal / behavior - 1| / 2 is above delta and A_t·log(proximal / behavior)
    > 0, else 1.  [T] -> [T].

    arXiv:2603.01365 (VACO), an answer at a time as open-instruct has it. Half that mean estimates the total variation
    between the two policies; in an answer beyond it no token is pushed further away from the behavior, while those
    that are pulled back keep their gradient. It masks and does not weigh: beside it let the ratio be anchored at the
    behavior.

    delta          the total variation that an answer may have
    denominator    all or kept: do masked tokens count in the denominators?
    """

    delta: float = 0.02
    denominator: str = "all"
    asks: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs", "advantages"})

    def __post_init__(self) -> None:
        one_of("denominator", self.denominator, DENOMINATORS)
        if not self.delta >= 0:
            raise ConfigError(f"delta = {self.delta}; it must not be negative: on-policy answers have a mean of 0")

    def weights_of(self, tokens: Tokens) -> Tensor:
        x_T = tokens.log_weight.detach()
        apart_T = over_group((bounded_exp(x_T) - 1).abs() / 2, tokens.sample, "mean")
        away_T = (apart_T > self.delta) & (tokens.advantages * x_T > 0)
        return torch.where(away_T, 0.0, torch.ones_like(x_T))

    def __str__(self) -> str:
        return (
            f"0 where mean |proximal / behavior - 1|/2 of the answer > {self.delta:g} and A·log(proximal / "
            "behavior) > 0, else 1"
        )


@dataclass(frozen=True)
class Freshness(MaskCorrection):
    """c_t = 2^(-age / half_life), 0 where age > oldest; age = versions since the token was drawn.  [T] -> [T].

    No paper's: a token counts by how old the weights were that drew it, whatever their probabilities say, as replay by
    freshness does (arXiv:2604.16918) with whole samples. It does not reach from the behavior to the policy: beside it
    let the ratio be anchored at the behavior, or be sure that a version is a small step. An answer may span several
    versions.

    half_life      after so many versions a token counts half
    oldest         a token older than this counts nothing; None leaves that open
    denominator    all or kept: do tokens that count nothing stay in the denominators?
    """

    half_life: float = 4.0
    oldest: int | None = None
    denominator: str = "all"
    asks: ClassVar[frozenset[str]] = frozenset({"ages"})

    def __post_init__(self) -> None:
        one_of("denominator", self.denominator, DENOMINATORS)
        if not self.half_life > 0:
            raise ConfigError(f"half_life = {self.half_life}; it must be positive: a number of versions")
        if self.oldest is not None and not self.oldest >= 0:
            raise ConfigError(f"oldest = {self.oldest}; it must not be negative: a fresh token has age 0")

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.oldest is not None else {"denominator": "correction.oldest is not set"}

    def weights_of(self, tokens: Tokens) -> Tensor:
        weight_T = (tokens.age / -self.half_life).exp2()
        return weight_T if self.oldest is None else torch.where(tokens.age > self.oldest, 0.0, weight_T)

    def __str__(self) -> str:
        text = f"2^(-age/{self.half_life:g}), age = versions since the token was drawn"
        return text if self.oldest is None else f"{text}, 0 above {self.oldest}"
