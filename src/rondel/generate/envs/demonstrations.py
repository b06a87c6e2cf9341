"""Supervised phases: the answer is shown instead of sampled. No engine is involved."""

from __future__ import annotations

from collections.abc import Sequence

from rondel.core.errors import DataError
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.single_turn import Example, opening_messages
from rondel.text.special_tokens import SPLIT


class Demonstrate:
    """Gives the prompt, then writes task.data["answer"] as the policy's own tokens: logprobs 0, versions 0.

    `policy` names the writer: "policy" in a supervised phase, `DATA` for a
    demonstration among the policy's own samples.
    """

    def __init__(
        self, *, suffix: str = "", system: str | None = None, examples: Sequence[Example] = (), policy: str = "policy"
    ) -> None:
        self.suffix, self.system, self.examples, self.policy = suffix, system, examples, policy

    async def run(self, task: Task, chat: TokenChat) -> Trajectory:
        if "answer" not in task.data:
            raise DataError(f"task {task.id} has no 'answer' to demonstrate; it has: {', '.join(task.data)}")
        chat.give(opening_messages(task, suffix=self.suffix, system=self.system, examples=self.examples))
        chat.write(str(task.data["answer"]), split_special_tokens=task.data.get(SPLIT, True))
        chat.trajectory.policy = self.policy
        return chat.trajectory
