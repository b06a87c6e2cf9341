"""The weight of a token that another policy drew: proximal / behavior. It scales the surrogate and carries no gradient.

T trainable tokens · log_weight_T = log pi_proximal - log pi_behavior · sample_T which
belong together. What is masked or rejected weighs 0. `denominator` says which tokens count in the denominators:

    all        every token: a step with many rejections is a smaller step
    kept       those that weigh something; a sample without any token left is not counted
    accepted   those that were neither rejected nor vetoed; what `action = "mask"` masks stays

A token that does not count pays no KL and earns no entropy bonus either; for the others these terms are not corrected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.scored_samples import group_sizes, over_group
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import bounded_exp
from rondel.algos.truncation import Bound, least_error_bound
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

LEVELS = ("token", "sequence", "geometric")
DENOMINATORS = ("all", "kept", "accepted")


def level_weights(log_weight_T: Tensor, sample_T: Tensor, level: str) -> Tensor:
    """log w of the token itself, the sum over its sample, or the mean over its sample.  [T], [T] -> [T]."""
    return (
        log_weight_T
        if level == "token"
        else over_group(log_weight_T, sample_T, "sum" if level == "sequence" else "mean")
    )


@dataclass(frozen=True)
class NoCorrection(Component):
    """c_t = 1.  [T], [T], [T] -> [T].  Right when the tokens were drawn from the proximal policy."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, log_weight_T: Tensor, sample_T: Tensor, advantages_T: Tensor) -> Tensor:
        return torch.ones_like(log_weight_T)

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class Importance(Component):
    """c_t = action(pi_proximal / pi_behavior), taken at a level; 0 where rejected or vetoed.  [T], [T], [T] -> [T].

    arXiv:2110.00641 (decoupled); Yao et al. 2025 (truncated); arXiv:2510.18855 (IcePop: token,
    mask); Liu and Li 2025 (sequence, geometric). Truncating adds bias and buys variance. A
    token's own weight ignores the tokens before it;
    that of its sequence does not, and explodes.

    level          token; sequence: the product over the sample; geometric: its geometric mean;
                   none: 1, so that it only rejects
    action         truncate at high; clip into [low, high]; mask: 0 outside of [low, high]
    low            the smallest weight that is kept
    high           the largest weight that is kept; "auto": the one of least bias² + variance over the whole update
    reject         none, or a level at which a token or a sample outside of [reject_low, reject_high] weighs 0
    reject_low     smallest ratio that is not rejected
    reject_high    largest ratio that is not rejected
    veto           a sample with any token's ratio below this weighs 0; 0 is no veto, 1e-4 the usual one
    normalize      none; token: the mean weight of all tokens of the update is 1; sequence: the mean over samples is 1
    denominator    all, kept or accepted: which tokens count in the denominators
    """

    level: str = "token"
    action: str = "truncate"
    low: float = 0.5
    high: float | str = 2.0
    reject: str = "none"
    reject_low: float = 0.5
    reject_high: float = 2.0
    veto: float = 0.0
    normalize: str = "none"
    denominator: str = "all"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("level", self.level, ("none", *LEVELS))
        one_of("action", self.action, ("truncate", "clip", "mask"))
        one_of("reject", self.reject, ("none", *LEVELS))
        one_of("normalize", self.normalize, ("none", "token", "sequence"))
        one_of("denominator", self.denominator, DENOMINATORS)
        if isinstance(self.high, str):
            one_of("high", self.high, ("auto",))
            if self.action == "mask":
                raise ConfigError(
                    "high = 'auto' beside action = 'mask': the bound is chosen for truncated weights; write a number"
                )
        elif not self.high >= 1:
            raise ConfigError(f"high = {self.high}; it must be at least 1, or on-policy tokens would be scaled down")
        if not 0 <= self.low <= 1:
            raise ConfigError(f"low = {self.low}; it must lie in [0, 1], or on-policy tokens would be scaled up")
        if not 0 <= self.reject_low <= 1 <= self.reject_high:
            raise ConfigError(
                f"reject_low = {self.reject_low}, reject_high = {self.reject_high}; 1 must lie between them"
            )
        if self.level == "none" and self.reject == "none" and not self.veto:
            raise ConfigError(
                "level = 'none' with nothing rejected and no veto corrects nothing; set reject or veto, or kind = "
                "'none'"
            )
        if not 0 <= self.veto < 1:
            raise ConfigError(f"veto = {self.veto}; it must lie in [0, 1): 1 is the ratio of an on-policy token")

    @property
    def needs(self) -> frozenset[str]:
        whole = self.normalize != "none" or self.denominator != "all" or self.high == "auto"
        return frozenset({"behavior_logprobs", "proximal_logprobs"} if whole else {"behavior_logprobs"})

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        idle = {"low": "truncate has no lower bound"} if self.action == "truncate" else {}
        if self.level == "none":
            idle |= dict.fromkeys(("action", "low", "high"), "correction.level is none")
        if self.reject == "none":
            idle |= dict.fromkeys(("reject_low", "reject_high"), "correction.reject is none")
        masks = self.action == "mask" and self.level != "none"
        if not masks and self.reject == "none" and not self.veto:
            idle["denominator"] = "nothing is masked, rejected or vetoed"
        return idle

    def _importance_weights(self, log_weight_T: Tensor, sample_T: Tensor) -> Tensor:
        """Before anything is rejected.  [T], [T] -> [T]."""
        if self.level == "none":
            return torch.ones_like(log_weight_T)
        weight_T = bounded_exp(level_weights(log_weight_T, sample_T, self.level))
        if self.action == "mask":
            assert not isinstance(self.high, str)
            return torch.where((weight_T >= self.low) & (weight_T <= self.high), weight_T, 0.0)
        return weight_T.clamp(self.low if self.action == "clip" else None, self.bound(log_weight_T, sample_T).high)

    def bound(self, log_weight_T: Tensor, sample_T: Tensor) -> Bound:
        """`high`, chosen from all weights of the update where it is "auto", with its error.  [T], [T]."""
        if not isinstance(self.high, str):
            return Bound(self.high, math.nan, math.nan)
        weight_T = bounded_exp(level_weights(log_weight_T, sample_T, self.level))
        share_T = torch.ones_like(weight_T)
        return least_error_bound(
            weight_T, share_T if self.level == "token" else share_T / group_sizes(weight_T, sample_T)
        )

    def measures(self, log_weight_T: Tensor, sample_T: Tensor) -> dict[str, float]:
        if self.high != "auto" or self.level == "none" or not len(log_weight_T):
            return {}
        return {
            f"train/correction_{name}": value for name, value in self.bound(log_weight_T, sample_T)._asdict().items()
        }

    def _accepted_mask(self, log_weight_T: Tensor, sample_T: Tensor) -> Tensor:
        """Neither rejected nor vetoed.  [T], [T] -> [T] bool."""
        accepted_T = torch.ones_like(log_weight_T, dtype=torch.bool)
        if self.reject != "none":
            found_T = bounded_exp(level_weights(log_weight_T, sample_T, self.reject))
            accepted_T = (found_T >= self.reject_low) & (found_T <= self.reject_high)
        if self.veto:
            accepted_T = accepted_T & (over_group(log_weight_T, sample_T, "amin") >= math.log(self.veto))
        return accepted_T

    def counts(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor:
        """The tokens that count in the denominators, of which weight_T are the weights.  [T], [T], [T] -> [T] bool."""
        if self.denominator == "accepted":
            return self._accepted_mask(log_weight_T.detach(), sample_T)
        return weight_T != 0 if self.denominator == "kept" else torch.ones_like(weight_T, dtype=torch.bool)

    def truncated(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor | None:
        """Tokens whose weight `high` or `low` held; those that are dropped are not among them.  [T], [T], [T] -> [T]
        bool. Under high = "auto" told from weight_T, as the update's bound has made them.
        """
        if self.level == "none" or self.action == "mask" or (self.high == "auto" and self.normalize != "none"):
            return None
        raw_T = bounded_exp(level_weights(log_weight_T, sample_T, self.level))
        if isinstance(self.high, str):
            held_T = weight_T < raw_T * (1 - 1e-5)
        else:
            held_T = raw_T > self.high
        if self.action == "clip":
            held_T = held_T | (raw_T < self.low)
        return held_T & (weight_T != 0)

    def __call__(self, log_weight_T: Tensor, sample_T: Tensor, advantages_T: Tensor) -> Tensor:
        log_weight_T = log_weight_T.detach()
        weight_T = self._importance_weights(log_weight_T, sample_T)
        weight_T = torch.where(self._accepted_mask(log_weight_T, sample_T), weight_T, 0.0)
        return weight_T if self.normalize == "none" else weight_T / _mean_weight(weight_T, sample_T, self.normalize)

    def __str__(self) -> str:
        low = "0" if self.action == "truncate" else f"{self.low:g}"
        ratio = {
            "token": "proximal / behavior",
            "sequence": "product of {} over the sample",
            "geometric": "geometric mean of {} over the sample",
        }
        if self.level == "none":
            text = "1"
        else:
            high = "C of least bias² + variance" if isinstance(self.high, str) else f"{self.high:g}"
            text = f"{ratio[self.level].format('proximal / behavior')}, " + (
                f"0 outside of [{low}, {high}]" if self.action == "mask" else f"held to [{low}, {high}]"
            )
        if self.reject != "none":
            text += f", 0 where the {self.reject} ratio is outside of [{self.reject_low:g}, {self.reject_high:g}]"
        if self.veto:
            text += f", 0 for a sample with a token ratio below {self.veto:g}"
        return (
            text + ("" if self.normalize == "none" else f", scaled to a mean of 1 a {self.normalize}") + "; no gradient"
        )


def _mean_weight(weight_T: Tensor, sample_T: Tensor, over: str) -> Tensor:
    """The mean weight of all tokens, or of all samples with each sample's tokens averaged; 1 where all weigh 0."""
    share_T = torch.ones_like(weight_T) if over == "token" else 1 / group_sizes(weight_T, sample_T)
    mean = (share_T * weight_T).sum() / share_T.sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1.0)


@dataclass(frozen=True)
class OffPolicyMask(Component):
    """c_t = 0 where A_t < 0 and mean over the sample of (log pi_behavior - log pi_proximal)
    > delta, else 1.  [T], [T], [T] -> [T].

    arXiv:2512.02556 (DeepSeek-V3.2), with the policy at its proximal anchor: a bad answer that
    the policy has already left teaches nothing more. The behavior is the engine's record; a recomputed
    one would make the mean 0 in a step of one update.

    delta          nats a token that the policy may have moved away
    denominator    all or kept: do masked tokens count in the denominators?
    """

    delta: float = 0.5
    denominator: str = "all"

    def __post_init__(self) -> None:
        one_of("denominator", self.denominator, ("all", "kept"))
        if not self.delta >= 0:
            raise ConfigError(f"delta = {self.delta}; it must not be negative: on-policy samples have a mean of 0")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            {"behavior_logprobs", "advantages"} | ({"proximal_logprobs"} if self.denominator == "kept" else set())
        )

    def counts(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor:
        """The tokens that count in the denominators.  [T], [T], [T] -> [T] bool."""
        return weight_T != 0 if self.denominator == "kept" else torch.ones_like(weight_T, dtype=torch.bool)

    def __call__(self, log_weight_T: Tensor, sample_T: Tensor, advantages_T: Tensor) -> Tensor:
        left_T = over_group(-log_weight_T.detach(), sample_T, "mean") > self.delta
        return torch.where(left_T & (advantages_T < 0), 0.0, torch.ones_like(log_weight_T))

    def __str__(self) -> str:
        return f"0 where A < 0 and mean(logp_behavior - logp_proximal) of the sample > {self.delta:g}, else 1"
