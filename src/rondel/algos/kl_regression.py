"""A surrogate that regresses the reward on the log-ratio to the sampler: no critic, no group, no clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.surrogate import Surrogate
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import Tokens
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

FLOOR = 1e-6  # of a probability beside a token or outside a head
ESTIMATORS = ("mc", "topk", "binary")
ROUTES = ("token", "sequence")


@dataclass(frozen=True)
class KlRegression(Component):
    """l_t = -(A - beta·log(p/q))·z_t, z_t = log p - its mean over the sampler's draws, no gradient through the first
    factor.  [T], [T, K] -> [T].  yifanzhang-pro.github.io/KLPO (KLPO); as TRL computes it.

    p is the policy, q what drew the token, A the reward itself. At its optimum A - beta·log(p/q) is the same for every
    token, p ~ q·e^(A/beta): a step of a KL of weight beta towards q. Answers are single; no ratio multiplies anything.
    The mean that z takes off is an estimate:

    mc       z = log p - mean of log p(v_j) over M draws v_j of q beside the answer's own
    topk     z = log p - sum over the head of c_v·log p(v), c_v = q_v - rho·p_v, rho = q(tail)/p(tail): the K likeliest
             of q, and all others as one. Exact where K is the vocabulary
    binary   z = omega·log p, omega = (1 - q)/(1 - p): the token, and all others as one; needs nothing but the draws

    With route = "sequence" the first factor is one number an answer, D = A - beta·sum of (log(p/q) + k_t) with k_t the
    same estimate of KL(q || p) at t; topk then takes the gradient of k_t itself, and mc weighs each column of draws by
    the mean D of the others. Tails and complements are at least 1e-6.

    It assumes that the reward of an answer can be told from that of others without a baseline: with rewards far from 0
    the draw adds noise that a group would have taken off.

    estimator    mc, topk or binary
    route        token or sequence
    beta         what a nat between the policy and the sampler costs, in rewards
    draws        M: how many more draws mc has of each token's distribution
    top          K: how many of the likeliest tokens topk has
    """

    estimator: str = "mc"
    route: str = "token"
    beta: float = 0.1
    draws: int = 128
    top: int = 128
    probability: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"advantage", "behavior"})
    slope: ClassVar[str] = "-(A - beta·log(u))"

    def __post_init__(self) -> None:
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("route", self.route, ROUTES)
        if not self.beta >= 0:
            raise ConfigError(f"beta = {self.beta}; it must not be negative: distance to the sampler would be rewarded")
        if not self.draws >= (2 if self.route == "sequence" else 1):
            raise ConfigError(
                f"draws = {self.draws}; it must be at least 1, and 2 with route = 'sequence', where each column of "
                "draws is weighed by the others"
            )
        if not self.top >= 1:
            raise ConfigError(f"top = {self.top}; it must be at least 1: how many tokens are recorded at each draw")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"behavior_logprobs"} | ({"behavior_top"} if self.estimator != "binary" else set()))

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        counts = {"draws": "mc", "top": "topk"}
        return {knob: f"surrogate.estimator is {self.estimator}" for knob, of in counts.items() if of != self.estimator}

    @property
    def push(self) -> str:
        return "" if self.estimator == "binary" else "(A - beta·log(u))·∇mean logp"

    @property
    def behavior_top(self) -> int:
        return self.top if self.estimator == "topk" else 0

    @property
    def behavior_draws(self) -> int:
        return self.draws if self.estimator == "mc" else 0

    def __call__(self, tokens: Tokens) -> Surrogate:
        compute = {"mc": self._by_draws, "topk": self._by_head, "binary": self._by_complement}[self.estimator]
        return Surrogate(compute(tokens), torch.zeros_like(tokens.guided))

    def _by_draws(self, tokens: Tokens) -> Tensor:
        log_p, log_q = _recorded(tokens)  # [T, M]
        if self.route == "token":
            return -self._token_feedback(tokens) * (tokens.logprobs - log_p.mean(-1))
        apart = log_q - log_p.detach()
        moved = _sum_of_answer(tokens.log_drift[:, None] + apart, tokens.sample)
        residual = tokens.advantages[:, None] - self.beta * moved
        others = (residual.sum(-1, keepdim=True) - residual) / (residual.shape[-1] - 1)
        return -(others * (tokens.logprobs[:, None] - log_p)).mean(-1)

    def _by_head(self, tokens: Tokens) -> Tensor:
        log_p, log_q = _recorded(tokens)  # [T, K]
        real = log_q > -torch.inf  # what fills a row up is no token
        q, p = log_q.exp(), torch.where(real, log_p.exp(), 0.0)
        tail_q, tail_p = ((1 - x.sum(-1)).clamp(min=FLOOR) for x in (q, p))
        if self.route == "token":
            c = (q - (tail_q / tail_p)[:, None] * p).detach()
            return -self._token_feedback(tokens) * (tokens.logprobs - (c * torch.where(real, log_p, 0.0)).sum(-1))
        kl = (torch.where(real, q * (log_q - log_p), 0.0)).sum(-1) + tail_q * (tail_q.log() - tail_p.log())
        return -self._answer_feedback(tokens, kl) * (tokens.logprobs + kl)

    def _by_complement(self, tokens: Tokens) -> Tensor:
        log_p = tokens.logprobs.detach()
        log_q = log_p - tokens.log_drift
        rest_q, rest_p = ((-torch.expm1(x)).clamp(min=FLOOR) for x in (log_q, log_p))
        corrected = rest_q / rest_p * tokens.logprobs
        if self.route == "token":
            return -self._token_feedback(tokens) * corrected
        kl = -log_q.exp() * tokens.log_drift + rest_q * (rest_q.log() - rest_p.log())
        return -self._answer_feedback(tokens, kl) * corrected

    def _token_feedback(self, tokens: Tokens) -> Tensor:
        return tokens.advantages - self.beta * tokens.log_drift

    def _answer_feedback(self, tokens: Tokens, kl: Tensor) -> Tensor:
        return tokens.advantages - self.beta * _sum_of_answer(tokens.log_drift + kl.detach(), tokens.sample)

    def __str__(self) -> str:
        means = {
            "mc": f"logp - mean logp of {self.draws} draws of the behavior",
            "topk": f"logp - mean logp over the behavior, from its {self.top} likeliest",
            "binary": "logp·(1 - behavior)/(1 - policy)",
        }
        cost = "log(u)" if self.route == "token" else "sum over the answer of (log(u) + KL)"
        return f"-(A - {self.beta:g}·{cost})·({means[self.estimator]}), u = policy / behavior of the token"


def _recorded(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Log-probabilities of what was recorded at each draw: by the policy, with its gradient, and by the behavior."""
    assert tokens.top_logprobs is not None and tokens.top_behavior is not None, "nothing was recorded beside the draws"
    return tokens.top_logprobs, tokens.top_behavior.to(tokens.top_logprobs.dtype)


def _sum_of_answer(values: Tensor, sample_T: Tensor) -> Tensor:
    """Every token gets the sum over its answer.  [T] or [T, M], [T] -> the same."""
    answers, index_T = sample_T.unique(return_inverse=True)
    return values.new_zeros(len(answers), *values.shape[1:]).index_add(0, index_T, values)[index_T]
