"""Several rounds of answers to one prompt: it is asked again while none of them is right."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b

from rondel.core.errors import DataError
from rondel.core.types import ATTEMPTS, DATA, GREEDY, SOLVED, Score, Trajectory

Round = list[list[Trajectory]]  # episodes


def _is_sample(trajectory: Trajectory) -> bool:
    return trajectory.is_attempt and trajectory.policy not in (DATA, GREEDY)


@dataclass
class PromptVisit:
    """`PromptVisit("digits/7", seed=0, number=12, again=0.5, most=8, kept=4)`: the rounds of admission 12, at most 8.

    All of them are of one admission, so the group is as old as its first answer, and the buffer holds it to that. What
    is drawn depends on the seed, the admission and the round alone: a run that goes on asks the same again.
    """

    task: str
    seed: int
    number: int
    again: float
    most: int
    kept: int
    rounds: int = 0
    attempts: int = 0
    solved: int = 0
    episodes: list[Round] = field(default_factory=list)

    def should_ask_again(self, episodes: Round) -> bool:
        """Count one more round. Whether another follows: not after a success, nor after an answer without a score."""
        rewards = [self._binary_reward(episode[0]) for episode in episodes if _is_sample(episode[0])]
        self.rounds += 1
        scored = [reward for reward in rewards if reward is not None]
        self.attempts, self.solved = self.attempts + len(scored), self.solved + int(sum(scored))
        self.episodes = [*self.episodes, episodes][-self.kept :]
        if self.solved or len(scored) < len(rewards) or self.rounds >= self.most:
            return False
        return self._draw() < self.again

    def close(self) -> Round:
        """The episodes that are kept, each with what all rounds counted as parts of its score."""
        counts = {ATTEMPTS: float(self.attempts), SOLVED: float(self.solved)}
        found = [episode for episodes in self.episodes for episode in episodes]
        for trajectory in (t for episode in found for t in episode):
            if isinstance(trajectory.score, Score):
                trajectory.score = replace(trajectory.score, parts={**trajectory.score.parts, **counts})
        return found

    def _binary_reward(self, trajectory: Trajectory) -> float | None:
        reward = trajectory.reward
        if reward not in (None, 0, 1):
            raise DataError(
                f"task {self.task}: an answer earned {reward:g}, and algo.advantage.kind = 'anchored' counts rewards "
                "of 0 and 1. Take a reward that says right or wrong, or another row (dr_grpo, maxrl)"
            )
        return reward

    def _draw(self) -> float:
        name = f"{self.seed}/{self.number}/{self.rounds}/ask again".encode()
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") / 2**64
