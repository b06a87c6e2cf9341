"""Advantages that weigh or re-share what the samples of a group have earned. Their contract is in `advantage.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.scored_samples import (
    ScoredSamples,
    group_deviations,
    group_sizes,
    group_stds,
    over_group,
)
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import bounded_exp
from rondel.core.errors import ConfigError
from rondel.core.registry import one_of


def _log_mean_exp(values_N: Tensor, group_N: Tensor) -> Tensor:
    """log mean exp over its group.  [N], [N] -> [N].  The group's largest is taken off first."""
    top_N = over_group(values_N, group_N, "amax")
    return top_N + over_group((values_N - top_N).exp(), group_N, "mean").log()


@dataclass(frozen=True)
class BatchNorm(Component):
    """A_i = (r_i - mean of its group) / (s + eps), s = std over the whole step.  -> [N].  arXiv:2510.13786 (ScaleRL).

    One scale for the step, so a prompt on which nearly all agree is not blown up as `group_norm` does. s is unbiased,
    of what the step's samples deviate from their groups' means, or of their rewards, as TRL has it. 0 for a constant
    group.

    over    what s is the std of: deviations or rewards
    eps     added to the standard deviation
    """

    over: str = "deviations"
    eps: float = 1e-6
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("over", self.over, ("deviations", "rewards"))
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or a constant step would divide 0 by 0")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        deviation_N = group_deviations(scored.rewards_N, scored.group_N)
        values_N = deviation_N if self.over == "deviations" else scored.rewards_N
        return deviation_N / (group_stds(values_N, torch.zeros_like(scored.group_N)) + self.eps)

    def __str__(self) -> str:
        what = "R - mean of its group" if self.over == "deviations" else "R"
        return f"(R - mean of its group) / (std of {what} over the step + {self.eps:g})"


@dataclass(frozen=True)
class SoftValue(Component):
    """A_i = r_i - V, V = beta·log mean exp(r / beta) over its group.  -> [N].  arXiv:2505.20686 (A*PO).

    V is the value of the best policy that a KL of weight beta lets one reach from whatever drew the group. The paper
    draws from the reference, before training; here the group itself is taken, which overstates V once the policy has
    improved. Not centered: V lies between the group's mean and its best.

    beta    small: the best of the group; large: its mean
    """

    beta: float = 0.5
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta = {self.beta}; it must be positive")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        height_N = scored.rewards_N - over_group(
            scored.rewards_N, scored.group_N, "amin"
        )  # a constant group: exactly 0
        return height_N - self.beta * _log_mean_exp(height_N / self.beta, scored.group_N)

    def __str__(self) -> str:
        return f"R - {self.beta:g}·log mean exp(R/{self.beta:g}) of its group"


@dataclass(frozen=True)
class Classify(Component):
    """A_i = c·e^(-s_i/tau) / (1 + sum of e^(-s/tau) over the good) for a good one, -c·e^(s_i/tau) / (1 + sum of
    e^(s/tau) over the bad) for a bad one; c = N / (groups·tau).

    -> [N]; s = mean over the sample of log pi_proximal - log pi_behavior; good is above the group's mean.
    arXiv:2602.05630 (REAL). With l = -A·logp and w = 1/(N·length) it has the gradient of the mean over groups of log(1
    + sum of e^(s/tau) over the bad) + log(1 + sum of e^(-s/tau) over the good), taken where the step began: the first
    update is exact. No weight exceeds c, whatever the rewards are. A constant group teaches nothing, and is counted.

    tau    how sharply; 1/tau bounds the weight of a sample
    """

    tau: float = 0.5
    compares: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"proximal_logprobs", "behavior_logprobs"})

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ConfigError(f"tau = {self.tau}; it must be positive")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        assert scored.proximal_T is not None and scored.behavior_T is not None
        rewards_N, written_N = scored.rewards_N, scored.lengths_N > 0
        moved_N = scored.sum_by_sample((scored.proximal_T - scored.behavior_T).to(rewards_N.dtype))
        score_N = moved_N / scored.lengths_N.clamp(min=1) / self.tau
        good_N = group_deviations(rewards_N, scored.group_N) > 0
        both_N = over_group((good_N & written_N).double(), scored.group_N, "amax") > 0
        both_N &= over_group((~good_N & written_N).double(), scored.group_N, "amax") > 0
        weight_N = torch.where(written_N, bounded_exp(torch.where(good_N, -score_N, score_N)), 0.0)
        side_N = 2 * scored.group_N.unique(return_inverse=True)[1] + good_N
        share_N = weight_N / (1 + over_group(weight_N, side_N, "sum"))
        groups = len(scored.group_N[written_N].unique())
        push_N = torch.where(good_N, share_N, -share_N) * (int(written_N.sum()) / (max(1, groups) * self.tau))
        return torch.where(both_N & written_N, push_N, 0.0)

    def __str__(self) -> str:
        return (
            f"± N/({self.tau:g}·groups)·its share of 1 + sum of exp(∓s/{self.tau:g}) over the good, or the bad, of its "
            "group, s = mean of logp_proximal - logp_behavior"
        )


@dataclass(frozen=True)
class Redistribute(Component):
    """A_i = lambda·f_i·d_i where d_i > 0, else d_i; d = r - mean of its group, f = least + (1 - least)·quality.  ->
    [N].

    MiMo-V2.6, as prime-rl's GAR. lambda = sum of d / sum of f·d over those above the mean, at most `most`; then the
    group is centered again, which changes something only where `most` binds. So what the winners of a group earned is
    shared out by a judge's opinion of each, and the losers are left alone. The judge's opinion, in [0, 1], is a part
    of the reward: let it weigh 0 there. One that has none counts as 0.5.

    part     the part of the reward that says how good a sample is
    least    f of the worst
    most     the largest lambda
    """

    part: str = "quality"
    least: float = 0.5
    most: float = 2.0
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.least <= 1:
            raise ConfigError(f"least = {self.least}; it must lie in (0, 1]: a winner must not lose all it earned")
        if not self.most >= 1:
            raise ConfigError(f"most = {self.most}; it must be at least 1, or equal winners would be scaled down")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        deviation_N = group_deviations(scored.rewards_N, scored.group_N)
        if self.part not in scored.parts and len(deviation_N):
            raise ConfigError(
                f"algo.advantage reads the part '{self.part}' of the reward, and the parts are: "
                f"{', '.join(scored.parts) or 'none'}. Let the reward return {{ name: value }}"
            )
        quality_N = scored.parts.get(self.part, deviation_N).nan_to_num(0.5)
        if bool(((quality_N < 0) | (quality_N > 1)).any()):
            raise ConfigError(
                f"the part '{self.part}' of the reward must lie in [0, 1]; found {quality_N.tolist()[:4]}"
            )
        above_N = deviation_N.clamp(min=0)
        held_N = (self.least + (1 - self.least) * quality_N) * above_N
        total_N, kept_N = (over_group(x_N, scored.group_N, "sum") for x_N in (above_N, held_N))
        scale_N = torch.where(kept_N > 0, total_N / kept_N.clamp(min=1e-300), 1.0).clamp(max=self.most)
        shared_N = torch.where(deviation_N > 0, scale_N * held_N, deviation_N)
        return shared_N - over_group(shared_N, scored.group_N, "sum") / group_sizes(shared_N, scored.group_N)

    def __str__(self) -> str:
        return (
            f"R - mean of its group, above it times λ·({self.least:g} + {1 - self.least:g}·{self.part}), λ ≤ "
            f"{self.most:g} so that their sum stays"
        )


@dataclass(frozen=True)
class AgentBaseline(Component):
    """A_i = r_i - b of its agent; b' = decay^n·b + (1 - decay^n)·mean of the step's n rewards of that agent.  -> [N].

    arXiv:2506.24119 (SPIRAL's role-conditioned advantage). In a zero-sum game the mean of a group is near 0 whatever
    the policy does, and one role may win more by the rules alone: each agent is compared with what it usually earns.
    All of a step are compared with the b from before it, so their order changes nothing; the paper moves b after each
    of them, which is the same where the rewards agree. The trainer keeps b between steps, and checkpoints it.

    decay        how much of b a reward leaves
    baselines    b at the start, by agent; one that is not named starts at 0
    """

    decay: float = 0.95
    baselines: dict[str, float] = field(default_factory=dict)
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay = {self.decay}; it must lie in [0, 1), or the baseline would never move")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        known = [self.baselines.get(agent, 0.0) for agent in scored.agents or [""] * len(scored.rewards_N)]
        return scored.rewards_N - torch.tensor(known, dtype=scored.rewards_N.dtype, device=scored.rewards_N.device)

    def next_baselines(self, agents: list[str], rewards: list[float]) -> dict[str, float]:
        """b of each agent of a step, after it."""
        out = {}
        for agent in dict.fromkeys(agents):
            own = [reward for name, reward in zip(agents, rewards, strict=True) if name == agent]
            kept = self.decay ** len(own)
            out[agent] = kept * self.baselines.get(agent, 0.0) + (1 - kept) * sum(own) / len(own)
        return out

    def __str__(self) -> str:
        return f"R - what its agent has earned so far, an exponential mean with {self.decay:g}"
