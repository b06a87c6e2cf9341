"""Surrogates that treat a few tokens of the update apart, chosen over all of it: by
covariance or by entropy. Contract: `surrogate.py`.

cov_t = (A_t - mean A)·(logp_t - mean logp) over all tokens, at the proximal policy. A step
along the policy gradient changes the entropy by about minus its mean: a few tokens of high
covariance make most of a collapse (arXiv:2505.22617).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.entropy import top_count_mask, top_share_mask
from rondel.algos.surrogate import Clip, Surrogate
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import LIMIT, Tokens, bounded_exp
from rondel.core.errors import ConfigError

NEEDS = frozenset({"proximal_logprobs"})


def token_covariances(tokens: Tokens) -> Tensor:
    """cov_t.  -> [T]."""
    a_T, logp_T = tokens.advantages, tokens.logprobs.detach()
    return (a_T - a_T.mean()) * (logp_T - logp_T.mean()) if len(a_T) else a_T


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"share = {share}; it must lie in (0, 1]: a share of the update's tokens")


@dataclass(frozen=True)
class ClipCov(Clip):
    """PPO's clip, but l = 0 for `share` of all tokens, taken from those with least < cov
    < most.  arXiv:2505.22617 (Clip-Cov).

    The paper draws them from that range at random. Here they are taken at equal steps
    along the order of their covariance: the same share of the same range, without dice. At
    least one, where the range is not empty.

    low      a ratio below 1 - low passes no gradient when A < 0
    high     a ratio above 1 + high passes no gradient when A > 0
    dual     a ratio above this passes no gradient when A < 0 either; None leaves that side open
    share    of the update's tokens that are silenced
    least    covariance above which a token may be silenced
    most     covariance below which it may
    """

    share: float = 2e-4
    least: float = 1.0
    most: float = 5.0
    scales_advantage: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = NEEDS

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self.share)
        if not self.least < self.most:
            raise ConfigError(f"least = {self.least}, most = {self.most}; no covariance lies between them")

    def select(self, tokens: Tokens) -> Tensor:
        cov_T = token_covariances(tokens)
        order = torch.arange(len(cov_T), device=cov_T.device)
        # two tokens always tie: not the first that came
        for key_T in (tokens.logprobs.detach(), tokens.advantages, cov_T):
            order = order[key_T[order].argsort(stable=True)]
        order = order[(cov_T[order] > self.least) & (cov_T[order] < self.most)]
        count = min(max(1, int(self.share * len(cov_T))), len(order))
        steps = ((torch.arange(count, device=order.device) + 0.5) * len(order) / max(1, count)).long()
        return torch.zeros_like(tokens.guided).index_fill(0, order[steps], True)

    def __call__(self, tokens: Tokens) -> Surrogate:
        own = super().__call__(tokens)
        return Surrogate(torch.where(tokens.selected, 0.0, own.loss_T), own.clipped_T | tokens.selected)

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; 0 for {self.share:g} of the tokens, from those of covariance in "
            f"({self.least:g}, {self.most:g})"
        )


@dataclass(frozen=True)
class KlCov(Component):
    """l = -r·A, and + coef·|log r| for the `share` of tokens of largest covariance.  arXiv:2505.22617 (KL-Cov).

    No clip. |log r| has no gradient at r = 1, so it acts from the second update of a step on.

    share    of the update's tokens that are held, rounded down, at least one
    coef     how strongly
    """

    share: float = 2e-3
    coef: float = 1.0
    needs: ClassVar[frozenset[str]] = NEEDS
    reads: ClassVar[frozenset[str]] = frozenset({"advantage", "ratio"})
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not self.coef > 0:
            raise ConfigError(f"coef = {self.coef}; it must be positive, or nothing holds the policy")

    def select(self, tokens: Tokens) -> Tensor:
        return top_count_mask(token_covariances(tokens), max(1, int(self.share * len(tokens.logprobs))))

    def __call__(self, tokens: Tokens) -> Surrogate:
        x_T = tokens.log_ratio
        loss_T = -bounded_exp(x_T) * tokens.advantages
        return Surrogate(
            torch.where(tokens.selected, loss_T + self.coef * x_T.abs(), loss_T), (x_T.abs() > LIMIT) & ~tokens.selected
        )

    def __str__(self) -> str:
        return f"-r·A; + {self.coef:g}·|log r| for the {self.share:g} of all tokens of largest covariance"


@dataclass(frozen=True)
class Forking(Clip):
    """PPO's clip on the `top` share of tokens of highest entropy, 0 on all others.
    arXiv:2506.01939.  The denominators count all tokens.

    low     a ratio below 1 - low passes no gradient when A < 0
    high    a ratio above 1 + high passes no gradient when A > 0
    dual    a ratio above this passes no gradient when A < 0 either; None leaves that side open
    top     the share of the update's tokens that are trained
    """

    top: float = 0.2
    scales_advantage: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = NEEDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top <= 1:
            raise ConfigError(f"top = {self.top}; it must lie in (0, 1]: a share of the update's tokens")

    def select(self, tokens: Tokens) -> Tensor:
        return top_share_mask(tokens.entropy, self.top)

    def __call__(self, tokens: Tokens) -> Surrogate:
        own = super().__call__(tokens)
        return Surrogate(torch.where(tokens.selected, own.loss_T, 0.0), own.clipped_T | ~tokens.selected)

    def __str__(self) -> str:
        return f"{super().__str__()}, on the {self.top:g} of all tokens of highest entropy"
