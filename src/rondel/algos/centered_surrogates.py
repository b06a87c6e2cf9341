"""A surrogate whose score has mean zero under the policy that drew the tokens. Its contract is in `surrogate.py`.

p, q = probabilities of policy and behavior; s_v = grad log p_v; sums over the vocabulary v, or a head H of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.exponent import bounded_exp
from rondel.algos.surrogate import Surrogate
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import Tokens
from rondel.core.errors import ConfigError

READS = frozenset({"advantage", "behavior"})
LEAST = 1e-6  # of a probability outside the head; less is rounding
TINY = 1e-30  # in the place of 0 in a denominator


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
