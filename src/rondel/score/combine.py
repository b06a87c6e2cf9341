"""Several rewards as one: all of them with names and weights, or for each task the one that is
named by a field of it.
"""

from __future__ import annotations

import inspect
import math
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score.clock import call_with_clock
from rondel.score.result import check_group, read_score


class RewardTraits:
    """What a worker wants to know of a reward, of several at once."""

    def __init__(self, rewards: dict[str, Callable[..., Any]]) -> None:
        self.rewards = rewards
        self.together = max(int(getattr(reward, "together", 1)) for reward in rewards.values())
        self.groupwise = any(getattr(reward, "groupwise", False) for reward in rewards.values())

    def open(self, folder: str | None) -> None:
        for reward in self.rewards.values():
            if hasattr(reward, "open"):
                reward.open(folder)

    @property
    def sleepable_rewards(self) -> list[Any]:
        """Those that leave their device while somebody else has it."""
        return [reward for reward in self.rewards.values() if getattr(reward, "naps", False)]

    @property
    def naps(self) -> bool:
        return bool(self.sleepable_rewards)

    def load_to_device(self) -> None:
        for reward in self.sleepable_rewards:
            reward.load_to_device()

    async def wake(self) -> None:
        for reward in self.sleepable_rewards:
            await reward.wake()

    async def sleep(self) -> None:
        for reward in self.sleepable_rewards:
            await reward.sleep()

    @property
    def memory(self) -> int:
        return sum(reward.memory for reward in self.sleepable_rewards)

    @property
    def separators(self) -> set[str]:
        """Behind which a step of an unfinished answer can be valued already."""
        return {separator for reward in self.rewards.values() for separator in getattr(reward, "separators", ())}

    async def precompute(self, episode: int, trajectory: Trajectory, task: Task, unfinished: bool) -> None:
        for reward in self.rewards_of(task):
            if getattr(reward, "separators", ()):
                await reward.precompute(episode, trajectory, task, unfinished)

    async def forget(self, episode: int) -> None:
        parts: list[Any] = list(self.rewards.values())
        for reward in parts:
            if getattr(reward, "separators", ()):
                await reward.forget(episode)

    def take_warning(self) -> str:
        found = [reward.take_warning() for reward in self.rewards.values() if hasattr(reward, "take_warning")]
        return " ".join(filter(None, found))

    def rewards_of(self, task: Task) -> list[Any]:
        """Those that judge this task."""
        return list(self.rewards.values())

    @property
    def counts(self) -> Mapping[str, float]:
        return ChainMap(*(reward.counts for reward in self.rewards.values() if hasattr(reward, "counts")))


class Combine(RewardTraits):
    """`Combine({"correct": (1.0, Number()), "format": (0.2, Format(tag="answer"))})` ->
    Score(1.2, {"correct": 1.0, "format": 0.2}).

    Parts are reported with their weight, so they add up to the value; steps keep their
    positions. One failed part fails the whole.
    """

    def __init__(self, parts: dict[str, tuple[float, Callable[..., Any]]]) -> None:
        if not parts or "total" in parts:
            raise ConfigError(
                f"reward 'combine' needs named parts, none of them called 'total'; it has: {', '.join(parts) or 'none'}"
            )
        self.parts = parts
        super().__init__({name: reward for name, (_, reward) in parts.items()})
        most = [weight * getattr(reward, "maximum", math.nan) for weight, reward in parts.values()]
        self.maximum = sum(most) if all(share >= 0 for share in most) else None  # a weight below 0 pays what is least

    async def __call__(self, asked: Trajectory | list[Trajectory], task: Task) -> Score | Failed | list[Score | Failed]:
        trajectories = asked if isinstance(asked, list) else [asked]
        found = [
            (name, weight, await _ask_reward(reward, trajectories, task))
            for name, (weight, reward) in self.parts.items()
        ]
        scores = [
            self._join_parts([(name, weight, of[i]) for name, weight, of in found]) for i in range(len(trajectories))
        ]
        return scores if isinstance(asked, list) else scores[0]

    def _join_parts(self, found: list[tuple[str, float, Score | Failed]]) -> Score | Failed:
        values: dict[str, float] = {}
        steps: list[tuple[int, float]] = []
        for name, weight, score in found:
            if isinstance(score, Failed):
                return Failed(score.reason, f"part '{name}' {score.reason} {score.detail}".strip())
            values[name] = weight * score.value
            steps += [(position, weight * value) for position, value in score.steps]
        return Score(sum(values.values()), values, tuple(steps))


class By(RewardTraits):
    """`By("source", {"sums": Number(), "proofs": Math()})`: a task is judged by the
    reward that its data["source"] names.
    """

    def __init__(self, field: str, parts: dict[str, Callable[..., Any]]) -> None:
        if not parts:
            raise ConfigError('reward \'by\' has no parts: parts = { sums = "number", proofs = "math" }')
        self.field = field
        super().__init__(parts)
        most = {getattr(reward, "maximum", None) for reward in parts.values()}
        self.maximum = most.pop() if len(most) == 1 else None

    def rewards_of(self, task: Task) -> list[Any]:
        return [reward for value, reward in self.rewards.items() if value == task.data.get(self.field)]

    async def __call__(self, asked: Trajectory | list[Trajectory], task: Task) -> Score | Failed | list[Score | Failed]:
        value = task.data.get(self.field)
        if value not in self.rewards:
            known = ", ".join(self.rewards)
            raise DataError(f"task {task.id} has {self.field} = {value!r}, and reward 'by' has parts for: {known}")
        trajectories = asked if isinstance(asked, list) else [asked]
        scores = await _ask_reward(self.rewards[value], trajectories, task)
        return scores if isinstance(asked, list) else scores[0]


async def _ask_reward(reward: Any, trajectories: list[Trajectory], task: Task) -> list[Score | Failed]:
    """All together if it is groupwise, else one after the other."""
    if getattr(reward, "groupwise", False):
        returned = call_with_clock(reward, trajectories, task)
        return check_group(await returned if inspect.isawaitable(returned) else returned, trajectories)
    scores = []
    for trajectory in trajectories:
        returned = call_with_clock(reward, trajectory, task)
        scores.append(read_score(await returned if inspect.isawaitable(returned) else returned))
    return scores
