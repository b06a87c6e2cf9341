"""Advantages by what a prompt has earned so far, over several steps. Their contract is in `advantage.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rondel.algos.component import Component
from rondel.algos.scored_samples import ScoredSamples, group_deviations
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError


@dataclass(frozen=True)
class PromptNorm(Component):
    """A_i = clip((r_i - mean) / (std + eps), -bound, bound) over the last `window` rewards of its prompt.  -> [N].
    arXiv:2305.13301 (DDPO).

    Those of the step are among them; std is that of a population, as numpy's. With fewer than `least` of them, or a
    window of 0, mean and std are those of the whole step. The trainer keeps the rewards of earlier steps, and a
    checkpoint too. Zero where all rewards agree.

    window     rewards of a prompt that are remembered, a step of more is kept whole; 0: none, all of the step are
               compared
    least      with fewer rewards of its prompt a sample is compared with the whole step
    eps        added to the standard deviation
    bound      largest size of an advantage
    history    rewards at the start, by task; one that is not named has none
    """

    window: int = 16
    least: int = 16
    eps: float = 1e-6
    bound: float = 10.0
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ConfigError(f"window = {self.window}; it must be 0 or more rewards of a prompt")
        if not 1 <= self.least <= max(1, self.window) and self.window:
            raise ConfigError(
                f"least = {self.least}; it must lie in [1, window = {self.window}], or no prompt would have enough"
            )
        if not self.eps > 0:
            raise ConfigError(f"eps = {self.eps}; it must be positive, or equal rewards would divide 0 by 0")
        if not self.bound > 0:
            raise ConfigError(f"bound = {self.bound}; it must be positive, or nothing would be learned")

    @property
    def idle(self) -> Mapping[str, str]:
        return {} if self.window else dict.fromkeys(("least", "history"), "advantage.window is 0")

    def __call__(self, scored: ScoredSamples) -> Tensor:
        rewards_N = scored.rewards_N
        tasks = scored.tasks or tuple(map(str, scored.group_N.tolist()))
        order = scored.group_N.argsort(stable=True).tolist()
        known = self.next_history([tasks[i] for i in order], rewards_N[order].tolist())
        least = self.least if self.window else len(tasks) + 1
        each = [kept if len(kept := tuple(known.get(task, ()))) >= least else None for task in tasks]
        standard = {kept: _standardize(rewards_N, kept, self.eps) for kept in dict.fromkeys(each)}
        if not each:
            return rewards_N
        found = [standard[kept][i] for i, kept in enumerate(each)]
        return torch.stack(found).clamp(-self.bound, self.bound)

    def next_history(self, tasks: Sequence[str], rewards: Sequence[float]) -> dict[str, list[float]]:
        """The last `window` rewards of each task of a step, after it; those of the step by group and all of them,
        however many, so that no order of its samples changes them.
        """
        new: dict[str, list[float]] = {}
        for task, reward in zip(tasks, rewards, strict=True) if self.window else ():
            new.setdefault(task, []).append(reward)
        return {task: [*self.history.get(task, ()), *own][-max(self.window, len(own)) :] for task, own in new.items()}

    def __str__(self) -> str:
        over = f"the last {self.window} of its prompt, of the step with fewer than {self.least}"
        return f"(R - mean) / (std + {self.eps:g}) over {over if self.window else 'the step'}, held to ±{self.bound:g}"


def _standardize(rewards_N: Tensor, kept: tuple[float, ...] | None, eps: float) -> Tensor:
    """(r - mean) / (std + eps) by what is kept, or by all of the step. Exactly 0 where all of these agree and r too."""
    over_M = rewards_N if kept is None else rewards_N.new_tensor(kept)
    whole_M = torch.zeros_like(over_M, dtype=torch.int64)
    std = group_deviations(over_M, whole_M).square().mean().sqrt()
    least = over_M.min()
    return (rewards_N - least - (over_M - least).mean()) / (std + eps)
