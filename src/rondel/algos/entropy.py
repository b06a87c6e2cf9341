"""A reward for staying undecided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rondel.algos.component import Component
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError

if TYPE_CHECKING:
    from rondel.algos.tokens import Tokens


def top_share_mask(values_T: Tensor, share: float) -> Tensor:
    """The share of tokens with the largest values, at least one; those equal to the
    smallest of them too.  [T] -> [T] bool.
    """
    return top_count_mask(values_T, max(1, math.ceil(share * len(values_T))))


def top_count_mask(values_T: Tensor, count: int) -> Tensor:
    """So many tokens with the largest values; those equal to the smallest of them too.  [T] -> [T] bool."""
    if not len(values_T):
        return torch.zeros_like(values_T, dtype=torch.bool)
    return values_T >= values_T.topk(count).values[-1]


@dataclass(frozen=True)
class EntropyBonus(Component):
    """b_t = coef·H_t, subtracted from the loss; H_t = -sum_v p_v log p_v.  [T] -> [T].  arXiv:1602.01783 (A3C).

    H comes from the pass that makes the logprobs, with its gradient. With `target` it acts
    only in updates that begin below it, and with `delta` its weight grows by that much
    after a step whose mean entropy was below the
    target, and shrinks after another, within [least, most] (arXiv:2505.22312, Skywork-OR1).
    With `top` it acts only on the tokens of
    highest entropy, where the policy has a choice (arXiv:2506.01939).

    coef      weight of the entropy, in [-1, 1]; 0 leaves it out, a negative one sharpens the policy
    target    act only while the mean entropy of the update's tokens is below this many nats; None is always
    top       act only on this share of the update's tokens, those of highest entropy; 1 is all
    delta     how much coef moves after each step, up below the target and down above it; 0 leaves it as it is
    least     the lowest that delta makes of coef
    most      the highest that delta makes of coef
    """

    coef: float = 0.0
    target: float | None = None
    top: float = 1.0
    delta: float = 0.0
    least: float = 0.0
    most: float = 1.0

    def __post_init__(self) -> None:
        if not -1 <= self.coef <= 1:
            raise ConfigError(
                f"coef = {self.coef:g}; it must lie in [-1, 1]: entropy is in nats beside advantages of about 1, and "
                f"0.001 to 0.05 are common"
            )
        if not self.delta >= 0 or not self.least <= self.most:
            raise ConfigError(
                f"delta = {self.delta}, least = {self.least}, most = {self.most}; delta is at least 0, and least at "
                f"most most"
            )
        if self.delta and self.target is None:
            raise ConfigError(
                f"delta = {self.delta} moves coef towards a target, and there is none: set entropy.target, in nats a "
                f"token"
            )
        if not 0 < self.top <= 1:
            raise ConfigError(f"top = {self.top}; it must lie in (0, 1]: a share of the tokens")
        if self.target is not None and not self.target > 0:
            raise ConfigError(f"target = {self.target}; it must be positive: entropy is never below 0")

    @property
    def selects_tokens(self) -> bool:
        return bool(self.coef or self.delta) and (self.target is not None or self.top < 1)

    @property
    def is_adaptive(self) -> bool:
        return self.delta > 0

    def next_coef(self, measured: float) -> float:
        """coef ± delta, within [least, most]: what comes after a step whose tokens had this mean entropy."""
        if self.target is None:
            return self.coef
        return min(max(self.coef + (self.delta if measured < self.target else -self.delta), self.least), self.most)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"proximal_logprobs"} if self.selects_tokens else ())

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        if not self.coef and not self.delta:
            return dict.fromkeys(("target", "top", "delta", "least", "most"), "entropy.coef is 0")
        return {} if self.delta else dict.fromkeys(("least", "most"), "entropy.delta is 0")

    def select(self, tokens: Tokens) -> Tensor:
        """The tokens of a whole update on which it acts.  -> [T] bool."""
        entropy_T = tokens.entropy
        chosen_T = top_share_mask(entropy_T, self.top)
        return chosen_T if self.target is None or not len(entropy_T) else chosen_T & (entropy_T.mean() < self.target)

    def __str__(self) -> str:
        text = "entropy of the policy at the token"
        if self.top < 1:
            text += f", of the {self.top:g} of all tokens where it is highest"
        return text + ("" if self.target is None else f", while the mean of the update is below {self.target:g}")
