"""Estimators of KL(policy || reference) from the drawn token alone: x = log pi - log pi_ref, x ~ policy; and the KL
itself, where policy and reference are Gaussians.

         mean on-policy       mean gradient on-policy
    k1   KL                   0: in a loss it is noise
    k2   KL only for small x  that of KL(policy || reference)
    k3   KL, never negative   that of KL(reference || policy)

So the best number and the best gradient come from different estimators (arXiv:2506.09477).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rondel.algos.bounds import LARGEST, check_weight
from rondel.algos.component import Component
from rondel.algos.tensors import Tensor
from rondel.algos.tokens import bounded_exp, k1, k2, k3
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of

CLOSED_FORM = "closed_form"
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
SLOPES = {"k1": "1", "k2": "x", "k3": "1 - exp(-x)"}
FORMULAS = {"k1": "x", "k2": "x²/2", "k3": "exp(-x) - 1 + x"}


@dataclass(frozen=True)
class Kl(Component):
    """kl_t = k(log pi - log pi_ref), weighed by coef in the loss.  [T], [T], [T] -> [T].
    arXiv:2402.03300.  Tokens drawn on-policy.

    In the reward it is a cost that the token pays, r_t - coef·k(log pi_behavior - log pi_ref),
    and has no gradient of its own; a token is charged in one place only. In the advantage the token pays what it and
    those behind it cost, after any baseline: A_t
    - sum_{j >= t} coef·k_j. With a target the coefficient follows the KL of the samples (`next_coef`). `through`
    keeps the value of k1 or k3 and takes the gradient of k2, that of KL(policy
    || reference). `unbiased` multiplies by pi / pi_behavior, through which the gradient
    passes too (arXiv:2512.02556): value and
    gradient are then right for k1 and k3, whoever drew the tokens.

    kind        the estimator: k1, k2 or k3; closed_form: the KL itself, of the steps of a flow (arXiv:2505.05470)
    coef        its weight; 0 leaves the reference out
    where       loss, reward or advantage
    through     own, or k2: where the gradient comes from
    unbiased    weigh by policy / behavior
    target      nats of a whole sample that the coefficient is steered to, starting from coef; None keeps it
    steer       how the coefficient follows the target: proportional, or doubling, which doubles and halves it
    horizon     over how many samples it may change by a fifth, which is also the most of one step
    clamp       the largest size of the estimate of one token, beyond which it has no gradient; None leaves it open
    """

    kind: str = "k3"
    coef: float = 0.0
    where: str = "loss"
    through: str = "own"
    unbiased: bool = False
    target: float | None = None
    steer: str = "proportional"
    horizon: int = 10_000
    clamp: float | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, (*ESTIMATORS, CLOSED_FORM))
        if self.is_closed_form and (self.where != "loss" or self.target is not None):
            knob = "target" if self.where == "loss" else "where"
            raise ConfigError(
                f"kind = '{CLOSED_FORM}' with {knob}: it is a term of the loss, with a coefficient of its own"
            )
        one_of("where", self.where, ("loss", "reward", "advantage"))
        one_of("through", self.through, ("own", "k2"))
        one_of("steer", self.steer, ("proportional", "doubling"))
        if self.target is not None and not self.target > 0:
            raise ConfigError(
                f"target = {self.target}; it must be positive: a policy that learns moves away from its reference"
            )
        if self.clamp is not None and not self.clamp > 0:
            raise ConfigError(f"clamp = {self.clamp}; it must be positive, or no distance would cost anything")
        if not self.horizon >= 1:
            raise ConfigError(f"horizon = {self.horizon}; it must be at least 1 sample")
        check_weight("coef", self.coef, "the reference")
        if self.unbiased and self.through == "k2":
            raise ConfigError(
                "through = 'k2' with unbiased = true; each gives the gradient of the KL, both give it twice. Remove one"
            )

    @property
    def needs(self) -> frozenset[str]:
        if self.is_closed_form:
            return frozenset({"ref_means"}) if self.coef else frozenset()
        return (
            frozenset(
                {"ref_logprobs"}
                | ({"behavior_logprobs"} if self.unbiased or self.in_reward or self.in_advantage else set())
            )
            if self.coef
            else frozenset()
        )

    @property
    def is_closed_form(self) -> bool:
        """Whether it is computed from both distributions, and not from what was drawn."""
        return self.kind == CLOSED_FORM

    @cached_property
    def in_reward(self) -> bool:
        """The tokens pay it out of their rewards."""
        return self.coef > 0 and self.where == "reward"

    @cached_property
    def in_advantage(self) -> bool:
        """The tokens pay it out of their advantages, behind the baseline."""
        return self.coef > 0 and self.where == "advantage"

    @cached_property
    def in_loss(self) -> bool:
        """The loss has it."""
        return self.coef > 0 and self.where == "loss"

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        if not self.coef:
            return dict.fromkeys(
                ("kind", "where", "through", "unbiased", "target", "steer", "horizon", "clamp"), "kl.coef is 0"
            )
        if self.is_closed_form:
            knobs = ("through", "unbiased", "steer", "horizon", "clamp")
            return dict.fromkeys(knobs, f"kl.kind is {CLOSED_FORM}, which estimates nothing")
        idle = {} if self.target is not None else dict.fromkeys(("steer", "horizon"), "kl.target is not set")
        if self.target is not None and self.steer == "doubling":
            idle["horizon"] = "kl.steer is doubling"
        if self.in_reward or self.in_advantage:
            return idle | dict.fromkeys(
                ("through", "unbiased"), "a reward has no gradient, and the behavior drew the tokens"
            )
        return idle | ({"through": "k2 has that gradient already"} if self.kind == "k2" else {})

    @cached_property
    def is_adaptive(self) -> bool:
        return self.coef > 0 and self.target is not None

    def next_coef(self, measured: float, samples: int) -> float:
        """coef·(1 + clip(measured/target - 1, ±0.2)·min(1, samples/horizon)): what comes after a step
        of so many samples.  arXiv:1909.08593, without the bound, beyond which one step of five horizons would end it at
        or below 0.  By doubling: 2·coef where measured > 1.5·target, coef/2 where
        measured < target/1.5, else coef: PPO's rule, arXiv:1707.06347, which has it of KL(old || new).

        `measured` is the mean over samples of sum_t log pi_behavior - log pi_ref.
        """
        if self.target is None:
            return self.coef
        if self.steer == "doubling":
            # bounded, for it doubles every step while the target is out of reach
            coef = self.coef * (2.0 if measured > 1.5 * self.target else 0.5 if measured < self.target / 1.5 else 1.0)
            return min(max(coef, 1e-9), LARGEST)
        return self.coef * (1 + min(max(measured / self.target - 1, -0.2), 0.2) * min(1.0, samples / self.horizon))

    def token_cost(self, behavior_T: Tensor, ref_T: Tensor) -> Tensor:
        """coef·k, what each token pays where the reward has it.  [T], [T] -> [T]."""
        return self.coef * self._estimate_kl(behavior_T - ref_T)

    def _estimate_kl(self, x_T: Tensor) -> Tensor:
        """k, held to ±clamp.  [T] -> [T]."""
        kl_T = ESTIMATORS[self.kind](x_T)
        return kl_T if self.clamp is None else kl_T.clamp(-self.clamp, self.clamp)

    @property
    def slope(self) -> str:
        if self.is_closed_form:
            return "0"
        own = "x" if self.through == "k2" else SLOPES[self.kind]
        return f"{FORMULAS[self.kind]} + {own}" if self.unbiased else own

    def __call__(self, logprobs_T: Tensor, ref_T: Tensor, log_drift_T: Tensor) -> Tensor:
        """`log_drift_T` = log pi - log pi_behavior, read where `unbiased`."""
        kl_T = self._estimate_kl(logprobs_T - ref_T)
        if self.through == "k2" and self.kind != "k2":
            slope_T = k2(logprobs_T - ref_T)
            kl_T = kl_T.detach() + slope_T - slope_T.detach()
        return bounded_exp(log_drift_T) * kl_T if self.unbiased else kl_T

    @property
    def push(self) -> str:
        return "∇k" if self.is_closed_form else ""

    def __str__(self) -> str:
        if self.is_closed_form:
            return "KL(policy || reference) of a step: mean over the dimensions of (mu - mu_ref)²/(2·std²)"
        held = "" if self.clamp is None else f", held to ±{self.clamp:g},"
        text = f"{FORMULAS[self.kind]}{held} with x = logp - logp_ref"
        if self.through == "k2" and self.kind != "k2":
            text += ", the gradient that of x²/2"
        return f"policy / behavior · ({text})" if self.unbiased else text
