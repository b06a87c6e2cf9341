"""Surrogates that bend the weight of a token or an answer instead of cutting it off. Their contract is in
`surrogate.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.bounds import check_weight
from rondel.algos.component import Component
from rondel.algos.discount import discounted_returns
from rondel.algos.scored_samples import group_sizes, over_group
from rondel.algos.surrogate import Clip, Surrogate
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import LIMIT, Tokens, bounded_exp
from rondel.core.errors import ConfigError

READS = frozenset({"advantage", "ratio"})
LEAST = math.log(1e-8)  # of the log-weight of a whole answer


@dataclass(frozen=True)
class GammaWeight(Component):
    """l = -phi(W)·A·logp, phi(W) = W^k·exp(lambda·(1 - W)), W = policy / behavior of the whole answer, without
    gradient.

    arXiv:2602.10693 (VESPO). phi(1) = 1; it falls on both sides, so an answer that the policy has left weighs little,
    whether it became likelier or not. No length enters W, so it reaches far from 1 quickly: the steeper k and lambda,
    the less of a stale batch is learned. log W is held to [log 1e-8, 20], as the paper's code.

    k_pos         exponent of W where A >= 0
    lambda_pos    decay in W where A >= 0
    k_neg         exponent of W where A < 0
    lambda_neg    decay in W where A < 0
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})
    scales_advantage: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"advantage", "behavior"})

    def __post_init__(self) -> None:
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}; it must not be negative: far answers would weigh most"
                )

    @property
    def slope(self) -> str:
        pos, neg = (f"-u^{k:g}·exp({decay:g}·(1 - u))·A" for k, decay in self._shapes)
        return f"{pos} where A >= 0, else {neg}"

    @property
    def _shapes(self) -> tuple[tuple[float, float], tuple[float, float]]:
        return (self.k_pos, self.lambda_pos), (self.k_neg, self.lambda_neg)

    def __call__(self, tokens: Tokens) -> Surrogate:
        log_w_T = over_group(tokens.log_drift.clamp(-LIMIT, LIMIT), tokens.sample, "sum").clamp(LEAST, LIMIT)
        up_T, down_T = ((k * log_w_T + decay * (1 - log_w_T.exp())).exp() for k, decay in self._shapes)
        weight_T = torch.where(tokens.advantages >= 0, up_T, down_T)
        return Surrogate(-weight_T * tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        (k_pos, pos), (k_neg, neg) = self._shapes
        return (
            f"-W^k·exp(λ·(1 - W))·A·logp, W = policy / behavior of the answer, k, λ = {k_pos:g}, {pos:g} where A >= 0, "
            f"else {k_neg:g}, {neg:g}"
        )


@dataclass(frozen=True)
class DivergencePenalty(Component):
    """l = -r·A + |A|/(2·delta)·q·(r - 1)², q = the anchor's probability of the token.  arXiv:2606.09821 (DRPO).

    Its gradient weighs a token by 1 - sign(A·(r - 1))·|p - q|/delta: 0 at a shift of delta, and beyond it pulls the
    policy back, where `divergence_mask` only lets go. A shift is absolute, so a rare token is not held by its ratio.
    It needs the token ratio; the paper anchors at the behavior. log r is clamped to ±20.

    delta    the shift of a token's probability at which nothing pushes it further; above 1 nothing is pulled back
    """

    delta: float = 12.5
    token_ratio: ClassVar[bool] = True
    probability: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = READS
    slope: ClassVar[str] = "-A"

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ConfigError(f"delta = {self.delta}; it must be positive, or no token could move")

    def __call__(self, tokens: Tokens) -> Surrogate:
        x_T, a_T = tokens.log_ratio, tokens.advantages
        ratio_T, before_T = bounded_exp(x_T), (tokens.logprobs - x_T).detach().exp()
        penalty_T = a_T.abs() / (2 * self.delta) * before_T * (ratio_T - 1).square()
        return Surrogate(penalty_T - ratio_T * a_T, x_T.abs() > LIMIT)

    def __str__(self) -> str:
        return f"-r·A + |A|/{2 * self.delta:g}·q·(r - 1)², q = the anchor's probability of the token"


@dataclass(frozen=True)
class UnboundedPositive(Clip):
    """l = -A·logp where A > 0, else PPO's clip.  [T], [T], [T] -> [T], [T].  arXiv:2607.06987 (UP).

    A good token that was unlikely keeps its whole gradient however far it has come; a bad one is held by the clip and
    by `dual`. Only where A > 0 nothing compares the policy with what drew the tokens: fresh samples are assumed.

    low     a ratio below 1 - low passes no gradient when A < 0
    high    nothing: there is no bound where A > 0
    dual    a ratio above this passes no gradient when A < 0 either; None leaves that side open
    """

    dual: float | None = 3.0

    scales_advantage: ClassVar[bool] = True

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {"high": "the surrogate has no bound where A > 0"}

    def __call__(self, tokens: Tokens) -> Surrogate:
        own, good_T = super().__call__(tokens), tokens.advantages > 0
        loss_T = torch.where(good_T, -tokens.advantages * tokens.logprobs, own.loss_T)
        return Surrogate(loss_T, own.clipped_T & ~good_T)

    def __str__(self) -> str:
        return f"-A·logp where A > 0, else {super().__str__()}"


@dataclass(frozen=True)
class FutureKl(Clip):
    """l = f·(PPO's clip), f_t = clip(exp(sum over k >= t of gamma^(k-t)·log r_k), least, most), without gradient.

    arXiv:2603.19835 (FIPO). A token counts more where what followed it has become likelier since, less where it has
    become less likely. gamma = 2^(-1/half_life). A ratio above `dual` takes no part in the sum. Where A < 0 and r >
    `safe`, f is held to [0.8, 1]. At r = 1 every f is 1: it acts from the second update of a step on.

    low          a ratio below 1 - low passes no gradient when A < 0
    high         a ratio above 1 + high passes no gradient when A > 0
    dual         a ratio above this passes no gradient when A < 0 either; None leaves that side open
    half_life    after so many tokens what follows counts half
    least        the smallest f
    most         the largest f
    safe         ratio above which a token of A < 0 is not made heavier; None leaves that side open
    """

    half_life: float = 32.0
    least: float = 1.0
    most: float = 1.2
    safe: float | None = 4.0
    scales_advantage: ClassVar[bool] = True
    token_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.half_life > 0:
            raise ConfigError(f"half_life = {self.half_life}; it must be positive: a number of tokens")
        if not 0 <= self.least <= 1 <= self.most:
            raise ConfigError(
                f"least = {self.least}, most = {self.most}; 1 must lie between them: f of an unmoved policy"
            )

    def __call__(self, tokens: Tokens) -> Surrogate:
        own, f_T = super().__call__(tokens), self._influence(tokens)
        return Surrogate(f_T * own.loss_T, own.clipped_T)

    def _influence(self, tokens: Tokens) -> Tensor:
        """f.  -> [T]."""
        x_T = tokens.log_ratio.detach()
        ratio_T = bounded_exp(x_T)
        moved_T = x_T if self.dual is None else torch.where(ratio_T > self.dual, 0.0, x_T)
        future_T = discounted_returns(moved_T, tokens.sample, gamma=2 ** (-1 / self.half_life))
        f_T = bounded_exp(future_T).clamp(self.least, self.most)
        if self.safe is None:
            return f_T
        return torch.where((tokens.advantages < 0) & (ratio_T > self.safe), f_T.clamp(0.8, 1.0), f_T)

    def __str__(self) -> str:
        text = (
            f"f·({super().__str__()}), f = exp(sum of {2 ** (-1 / self.half_life):.4g}^k·log r over the k tokens "
            "that follow)"
        )
        return f"{text}, held to [{self.least:g}, {self.most:g}]"


@dataclass(frozen=True)
class SquaredGap(Component):
    """l = (beta·S - A)²/n, S = sum of log r over the answer's n tokens.  arXiv:2505.20686 (A*PO).

    With the ratio anchored at the reference, beta·S is the reward that the policy implies, and A = R - V* the one that
    the best policy under a KL of weight beta would: no ratio, no clip, any policy may have drawn the tokens. Added up
    over an answer it is one square. Assumes one advantage a sample.

    beta    what a nat from the reference costs
    """

    beta: float = 1e-3
    reads: ClassVar[frozenset[str]] = READS

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta = {self.beta}; it must be positive, or nothing would be learned")
        check_weight("beta", self.beta, "the reference")

    @property
    def slope(self) -> str:
        return f"-{self.steepness:g}·A"

    @property
    def steepness(self) -> float:
        return 2 * self.beta

    def __call__(self, tokens: Tokens) -> Surrogate:
        whole_T = over_group(tokens.log_ratio, tokens.sample, "sum")
        gap_T = self.beta * whole_T - tokens.advantages
        return Surrogate(gap_T.square() / group_sizes(gap_T.detach(), tokens.sample), torch.zeros_like(tokens.guided))

    def __str__(self) -> str:
        return f"({self.beta:g}·(sum of log r over the answer) - A)² / tokens of the answer"
