"""From the rewards of a step to one advantage a sample, or one a token where the rule says
`per_token`. One that `compares` needs a group.

N samples · T trainable tokens · P groups. All are permutation-invariant and total: no
samples, one sample or equal rewards give numbers, never NaN.
"""

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
    standardize_rewards,
    whiten_values,
)
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


@dataclass(frozen=True)
class GroupNorm(Component):
    """A_i = (r_i - mean) / (std + eps) over its group, std unbiased.  -> [N].  arXiv:2402.03300 (GRPO).

    Zero for a constant group and for a group of 1, which has nothing to be compared with.

    eps    added to the standard deviation; matters when a group's rewards nearly agree
    """

    eps: float = 1e-6
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or a constant group would divide 0 by 0")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return standardize_rewards(scored.rewards_N, scored.group_N, self.eps)

    def __str__(self) -> str:
        return f"(R - mean of its group) / (std of its group + {self.eps:g})"


@dataclass(frozen=True)
class NegativeExp(GroupNorm):
    """A_i = mean e^(-z) over its group - e^(-z_i), z = (r - mean) / (std + eps).  -> [N].  arXiv:2512.04332 (DDRL).

    -e^(-z) grows with the reward, and the worse a sample is the faster it falls: the bad ones are left before the good
    ones are told apart. The paper has no baseline; the group's mean is one, and changes no expected gradient. Zero for
    a constant group.

    eps    added to the standard deviation
    """

    def __call__(self, scored: ScoredSamples) -> Tensor:
        cost_N = (-super().__call__(scored)).exp()
        return -group_deviations(cost_N, scored.group_N)

    def __str__(self) -> str:
        return f"mean e^-z of its group - e^-z, z = (R - mean of its group) / (std of its group + {self.eps:g})"


@dataclass(frozen=True)
class GroupCenter(Component):
    """A_i = r_i - mean of its group.  -> [N].  arXiv:2503.20783 (Dr. GRPO).  Zero for a constant
    group or a group of 1.
    """

    compares: ClassVar[bool] = True

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return group_deviations(scored.rewards_N, scored.group_N)

    def __str__(self) -> str:
        return "R - mean of its group"


@dataclass(frozen=True)
class LeaveOneOut(Component):
    """A_i = r_i - mean of the others = n/(n-1)·(r_i - mean).  -> [N].  arXiv:2402.14740 (RLOO).

    Unbiased, since the baseline does not see r_i. Zero for a group of 1: there are no others.
    """

    compares: ClassVar[bool] = True

    def __call__(self, scored: ScoredSamples) -> Tensor:
        size_N = group_sizes(scored.rewards_N, scored.group_N)
        return group_deviations(scored.rewards_N, scored.group_N) * size_N / (size_N - 1).clamp(min=1)

    def __str__(self) -> str:
        return "R - mean of the others in its group"


@dataclass(frozen=True)
class Raw(Component):
    """A_i = r_i.  -> [N].  Williams 1992 (REINFORCE).  No baseline: unbiased, and noisy when rewards are far from 0."""

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return scored.rewards_N

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Constant(Component):
    """A_i = value.  -> [N].  Supervised learning.  The reward is not read.

    value    the advantage of every sample
    """

    value: float = 1.0

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return torch.full_like(scored.rewards_N, self.value)

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Greedy(Component):
    """A_i = r_i - reward of the greedy answer to the same prompt.  -> [N].  arXiv:2310.10505
    (ReMax).  Unbiased; one more answer a group.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"greedy"})

    def __call__(self, scored: ScoredSamples) -> Tensor:
        assert scored.greedy_N is not None, "the greedy baseline was not sampled"
        return scored.rewards_N - scored.greedy_N

    def __str__(self) -> str:
        return "R - reward of the greedy answer"


@dataclass(frozen=True)
class Preference(Component):
    """A_w = c·σ(-m), A_l = -A_w for the best and the worst of a group, 0 for the others; m =
    beta·((s_w - s_w_ref) - (s_l - s_l_ref)).

    -> [N]; s = sum of log pi over the sample, c = beta·N / pairs.  arXiv:2305.18290 (DPO),
    arXiv:2402.04792 (online).  With l = -A·logp and w = 1/N it has the gradient of the mean
    over pairs of -log σ(m). σ is taken where the
    step began, so the first update is exact. Where several are equally good, or bad, the
    group's pair is the mean over all of them; a
    constant group and a group of 1 prefer nothing.

    beta    how sharply; the KL to the reference that a preference may cost is in 1/beta
    """

    beta: float = 0.1
    compares: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"proximal_logprobs", "ref_logprobs"})

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta = {self.beta}; it must be positive, or nothing would be preferred")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        assert scored.proximal_T is not None and scored.ref_T is not None
        written_N, out_N = scored.lengths_N > 0, torch.zeros_like(scored.rewards_N)
        moved_N = scored.sum_by_sample((scored.proximal_T - scored.ref_T).to(scored.rewards_N.dtype))
        pairs = 0
        for group in scored.group_N[written_N].unique():
            mine = ((scored.group_N == group) & written_N).nonzero()[:, 0]
            rewards = scored.rewards_N[mine]
            better, worse = mine[rewards == rewards.max()], mine[rewards == rewards.min()]
            if rewards.max() > rewards.min():
                push = torch.sigmoid(-self.beta * (moved_N[better, None] - moved_N[worse])) / (len(better) * len(worse))
                out_N[better], out_N[worse] = push.sum(1), -push.sum(0)
                pairs += 1
        return out_N * (self.beta * int(written_N.sum()) / max(1, pairs))

    def __str__(self) -> str:
        return (
            f"± {self.beta:g}·N/pairs·σ(-m) for the best and the worst of its group, m = "
            f"{self.beta:g}·(difference of log pi/pi_ref)"
        )


@dataclass(frozen=True)
class LengthBaseline(Component):
    """A_i = r_i - sum(length·r) / sum(length) over its group.  -> [N].  arXiv:2505.23585 (OPO).

    The baseline of least variance where a sample's squared gradient grows with its length.
    Zero for a constant group or a group of 1.
    """

    compares: ClassVar[bool] = True

    def __call__(self, scored: ScoredSamples) -> Tensor:
        height_N = scored.rewards_N - over_group(scored.rewards_N, scored.group_N, "amin")
        length_N = scored.lengths_N.to(height_N.dtype)
        total_N = over_group(length_N, scored.group_N, "sum").clamp(min=1)
        return height_N - over_group(length_N * height_N, scored.group_N, "sum") / total_N

    def __str__(self) -> str:
        return "R - mean of its group weighed by length"


@dataclass(frozen=True)
class PassAtK(Component):
    """A_i = r_1 - r_2 for the best of its group, 0 for all others.  -> [N].  arXiv:2503.19595.

    The gain of a group's maximum through its best answer. Zero where two answers share
    the first place, and for a group of 1.

    divide    by the std of the group (+ eps)
    eps       added to that standard deviation
    """

    divide: bool = False
    eps: float = 1e-6
    compares: ClassVar[bool] = True

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.divide else {"eps": "advantage.divide is false"}

    def __call__(self, scored: ScoredSamples) -> Tensor:
        best_N = scored.rewards_N == over_group(scored.rewards_N, scored.group_N, "amax")
        alone_N = best_N & (over_group(best_N.to(scored.rewards_N.dtype), scored.group_N, "sum") == 1)
        second_N = over_group(scored.rewards_N.masked_fill(best_N, -torch.inf), scored.group_N, "amax")
        lead_N = torch.where(alone_N & second_N.isfinite(), scored.rewards_N - second_N, 0.0)
        return lead_N / (group_stds(scored.rewards_N, scored.group_N) + self.eps) if self.divide else lead_N

    def __str__(self) -> str:
        return f"R - second best, for the best of its group only{' / (std of its group + eps)' if self.divide else ''}"


@dataclass(frozen=True)
class MeanNorm(Component):
    """A_i = (r_i - mean) / (mean + eps) over its group.  -> [N].  arXiv:2602.02710 (MaxRL).  Rewards of 0 and 1.

    The gradient of log pass rate rather than of the pass rate: a prompt solved once in n
    answers counts n times. Zero without a success.

    eps    added to the mean
    """

    eps: float = 1e-6
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or a group without success would divide 0 by 0")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        mean_N = over_group(scored.rewards_N, scored.group_N, "mean")
        return torch.where(
            mean_N > 0, group_deviations(scored.rewards_N, scored.group_N) / (mean_N.abs() + self.eps), 0.0
        )

    def __str__(self) -> str:
        return f"(R - mean of its group) / (mean of its group + {self.eps:g})"


@dataclass(frozen=True)
class SignalCenter(Component):
    """A_i = N / N' · (r_i - mean of its group), N' the samples of groups that do not
    agree.  -> [N].  arXiv:2504.02546 (GPG).

    A step with many unanimous groups is as large as one without. Zero for a constant group.
    """

    compares: ClassVar[bool] = True

    def __call__(self, scored: ScoredSamples) -> Tensor:
        deviation_N = group_deviations(scored.rewards_N, scored.group_N)
        telling = (group_stds(scored.rewards_N, scored.group_N) > 0).sum().clamp(min=1)
        return deviation_N * len(deviation_N) / telling

    def __str__(self) -> str:
        return "(R - mean of its group) · samples / samples of groups that do not agree"


@dataclass(frozen=True)
class Accept(Component):
    """A_i = 1 where r_i > above, else 0.  -> [N].  arXiv:2304.06767, arXiv:2504.11343 (RAFT).
    Good answers are imitated, others left alone.

    above    the reward that an answer must exceed
    """

    above: float = 0.0

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return (scored.rewards_N > self.above).to(scored.rewards_N.dtype)

    def __str__(self) -> str:
        return f"1 if R > {self.above:g}, else 0"


@dataclass(frozen=True)
class WhitenedCenter(Component):
    """A_t = whitened over all tokens of the step: r_i - mean of its group.  -> [T].
    arXiv:2501.03262 (REINFORCE++-baseline).

    One scale for the whole step, so an easy prompt is not blown up. Zero for a constant group where the others balance.
    """

    per_token: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return whiten_values(scored.spread_to_tokens(group_deviations(scored.rewards_N, scored.group_N)))

    def __str__(self) -> str:
        return "R - mean of its group, less its mean and by its std over all tokens"


@dataclass(frozen=True)
class PartsNorm(Component):
    """A = whitened over the samples: sum over parts k of w_k·(r_k - mean) / (std + eps) in
    the group.  -> [N].  arXiv:2601.05242 (GDPO).

    Each named part of the reward has its own scale, so a rare large one does not drown the
    rest. A part that a sample does not have adds nothing to it, and mean and std are
    those of the group's samples that have it.

    weights    of the parts by name; one that is not named weighs 1
    eps        added to the standard deviation of a part
    """

    weights: dict[str, float] = field(default_factory=dict)
    eps: float = 1e-6
    reads_parts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or a constant part would divide 0 by 0")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        unknown = sorted(set(self.weights) - set(scored.parts))
        if len(scored.rewards_N) and (unknown or not scored.parts):
            raise ConfigError(
                f"algo.advantage reads the parts of the reward, which are: {', '.join(scored.parts) or 'none'}"
                + (
                    f"; weights also names {', '.join(unknown)}"
                    if unknown
                    else ". Let the reward return { name: value }"
                )
            )
        total_N, counted_N = torch.zeros_like(scored.rewards_N), torch.zeros_like(scored.rewards_N, dtype=torch.bool)
        for name, part_N in scored.parts.items():
            has_N = ~part_N.isnan()
            own = standardize_rewards(part_N[has_N], scored.group_N[has_N], self.eps)
            total_N[has_N] += self.weights.get(name, 1.0) * own
            counted_N |= has_N
        if not counted_N.all():
            raise ConfigError(
                f"algo.advantage reads the parts of the reward, and {int((~counted_N).sum())} of {len(counted_N)} "
                f"samples were scored with a "
                f"number alone. Let every reward return {{ name: value }}, as those with {', '.join(scored.parts)} do"
            )
        return whiten_values(total_N)

    def __str__(self) -> str:
        return (
            f"sum over parts of w·(part - mean) / (std + {self.eps:g}) in its group, "
            "less its mean and by its std over all samples"
        )
