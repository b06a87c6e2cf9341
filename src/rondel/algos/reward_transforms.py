"""What is done to a reward before it becomes an advantage. -> rewards_N"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rondel.algos.component import Component
from rondel.algos.scored_samples import ScoredSamples, over_group
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


@dataclass(frozen=True)
class NoShaping(Component):
    """R_i = r_i.  -> [N]."""

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return scored.rewards_N

    def __str__(self) -> str:
        return "reward"


@dataclass(frozen=True)
class ClipReward(Component):
    """R_i = clip(r_i, -limit, limit).  -> [N].  arXiv:2005.12729.  One wild reward cannot move critic and policy far.

    What is cut off a reward that was earned on the way is cut at its end.

    limit    the largest size of a reward
    """

    limit: float = 5.0

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ConfigError(f"limit = {self.limit}; it must be positive, or every reward would be the same")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        return scored.rewards_N.clamp(-self.limit, self.limit)

    def __str__(self) -> str:
        return f"clip(reward, ±{self.limit:g})"


@dataclass(frozen=True)
class Overlong(Component):
    """R_i = r_i - factor·clip((length_i - (max_tokens - buffer)) / buffer, 0, 1).  -> [N].  arXiv:2503.14476 (DAPO).

    Nothing up to max_tokens - buffer, then a straight line down to -factor at
    max_tokens: 20480 tokens with a buffer of 4096 start to pay at 16384. The limit is that of
    one reply, so of an episode with several turns the longest one is the length.

    max_tokens    where the penalty is full; unset, it becomes the recipe's max_tokens
    buffer        over how many tokens it grows; unset, a fifth of max_tokens, as in the paper
    factor        the full penalty
    """

    max_tokens: int | None = None
    buffer: int | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not self.max_tokens >= 1:
            raise ConfigError(f"max_tokens = {self.max_tokens}; it must be at least 1")
        if self.buffer is not None and not self.buffer >= 1:
            raise ConfigError(f"buffer = {self.buffer}; it must be at least 1 token")
        if self.max_tokens is not None and self.buffer is not None and self.buffer > self.max_tokens:
            raise ConfigError(
                f"buffer = {self.buffer}; it must not exceed max_tokens = {self.max_tokens}, or empty answers would "
                "pay too"
            )
        if not self.factor >= 0:
            raise ConfigError(f"factor = {self.factor}; it must not be negative: that would reward running over")

    def bounded(self, max_tokens: int) -> Overlong:
        return self if self.max_tokens is not None else replace(self, max_tokens=max_tokens)

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.factor else dict.fromkeys(("max_tokens", "buffer"), "shaping.factor is 0")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        if self.max_tokens is None:
            raise ConfigError("algo.shaping.max_tokens is not set: set it, or call row.bounded(max_tokens) first")
        start, buffer = self._penalty_ramp(self.max_tokens)
        over_N = (scored.longest_turn_N - start).to(scored.rewards_N.dtype) / buffer
        return scored.rewards_N - self.factor * over_N.clamp(0, 1)

    def __str__(self) -> str:
        start, buffer = (
            ("max_tokens + buffer", "buffer") if self.max_tokens is None else self._penalty_ramp(self.max_tokens)
        )
        return f"reward - {self.factor:g}·clip((length - {start}) / {buffer}, 0, 1)"

    def _penalty_ramp(self, max_tokens: int) -> tuple[int, int]:
        """Where the penalty starts, and over how many tokens it grows."""
        buffer = self.buffer if self.buffer is not None else max(1, max_tokens // 5)
        return max_tokens - buffer, buffer


@dataclass(frozen=True)
class KimiLength(Component):
    """R_i = r_i + factor·(λ_i where r_i > above, else min(0, λ_i)), λ = 0.5 - (length -
    min) / (max - min) over its group.  -> [N].

    arXiv:2501.12599 (Kimi k1.5). Short right answers gain up to half a point, long ones lose it;
    wrong ones can only lose. 0 where all are as long. No limit is in it: the length of an episode
    is that of all its turns.

    factor    the weight of it all
    above     the reward that a right answer exceeds
    """

    factor: float = 1.0
    above: float = 0.0

    def __post_init__(self) -> None:
        if not self.factor >= 0:
            raise ConfigError(f"factor = {self.factor}; it must not be negative: that would reward length")

    @property
    def idle(self) -> dict[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {} if self.factor else {"above": "shaping.factor is 0"}

    def __call__(self, scored: ScoredSamples) -> Tensor:
        length_N = scored.lengths_N.to(scored.rewards_N.dtype)
        least_N, most_N = (over_group(length_N, scored.group_N, how) for how in ("amin", "amax"))
        lambda_N = torch.where(most_N > least_N, 0.5 - (length_N - least_N) / (most_N - least_N).clamp(min=1), 0.0)
        return scored.rewards_N + self.factor * torch.where(
            scored.rewards_N > self.above, lambda_N, lambda_N.clamp(max=0)
        )

    def __str__(self) -> str:
        return (
            f"reward + {self.factor:g}·(λ if reward > {self.above:g}, else min(0, λ)), λ = 0.5 - (length - min) / (max "
            f"- min) of its group"
        )
