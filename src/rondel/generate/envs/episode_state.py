"""What the conversations of one episode share, and what becomes of them when it ends.

drift    "keep"    the tokens that were written go on; the first difference is found when the episode ends
         "branch"  what is rendered anew begins another trajectory, which shares the score of the episode
         "refuse"  the episode is a fault of its environment, which names the difference
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rondel.core.types import Failed, Ok, OutOfBudget, Trajectory
from rondel.generate.envs.episode_budget import EpisodeBudget

DriftPolicy = Literal["keep", "branch", "refuse"]


class CommandRecorder(Protocol):
    def record(self, episode: int, n: int, command: Any, *, exit: int, folder: str) -> None: ...


@dataclass
class EpisodeState:
    """`commands` keeps what was run in sandboxes, for an episode that is played again after a crash. `chats` are the conversations (TokenChat) in which the policy was asked. `drops`: an episode whose budget is used up has no
    score."""

    budget: EpisodeBudget = field(default_factory=EpisodeBudget)
    drift: DriftPolicy = "keep"
    drops: bool = False
    commands: CommandRecorder | None = None
    chats: list[Any] = field(default_factory=list)

    async def finish(self, episode: list[Trajectory]) -> list[Trajectory]:
        """The trajectories of the episode with those that were closed on the way, behind the others; each with its
        drift, and with the budget that ended it.
        """
        of = {id(chat.trajectory): chat for chat in self.chats}
        found, closed = list[Trajectory](), list[Trajectory]()
        for trajectory in episode:
            chat = of.get(id(trajectory))
            if chat is None:
                found.append(trajectory)
                continue
            await asyncio.sleep(0)
            trajectory.drift = trajectory.drift or chat.find_drift()
            found.append(_last_written(chat))
            closed += chat.closed
        if self.budget.over:
            for trajectory in found:
                if isinstance(trajectory.outcome, Ok):
                    trajectory.outcome = OutOfBudget(self.budget.over)
                    trajectory.score = Failed("out of budget", self.budget.over) if self.drops else trajectory.score
        self.chats.clear()
        return found + closed

    async def rescue(self) -> list[Trajectory]:
        """What was written in an episode whose environment could not go on without its budget."""
        written = [chat.trajectory for chat in self.chats if chat.trajectory.written or chat.closed]
        return await self.finish(written or [Trajectory()])


def _last_written(chat: Any) -> Trajectory:
    """The trajectory of a conversation; where nothing was written behind its last branch, the one before with its
    text and its score."""
    last: Trajectory = chat.trajectory
    if last.written or not chat.closed:
        return last
    before: Trajectory = chat.closed.pop()
    before.text, before.conversation, before.score = last.text, last.conversation, last.score
    before.outcome, before.finish_reason = last.outcome, last.finish_reason
    return before
