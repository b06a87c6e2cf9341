"""Supervised phases: the answer is shown instead of sampled. No engine is involved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rondel.core.errors import DataError
from rondel.core.types import Completion, Request, Task, Trajectory
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import as_trajectories
from rondel.generate.envs.single_turn import Example, opening_messages
from rondel.text.tokenization import SPLIT


class GoldEpisode:
    """Plays an environment with its own gold(task): the replies are the policy's tokens, logprobs 0, versions 0, and
    what the environment gives stays the environment's, mask 0. `trained`: the policy learns from it, and does not only
    read it.
    """

    def __init__(self, env: Any, *, policy: str = "policy", trained: bool = True) -> None:
        self.env, self.policy, self.trained = env, policy, trained

    async def run(self, task: Task, chat: TokenChat) -> list[Trajectory]:
        replies, end = iter(self.env.gold(task)), chat.end_token

        async def next_reply(request: Request) -> Completion:
            if (text := next(replies, None)) is None:
                raise DataError(f"the environment asks for more replies than its gold({task.id}) has")
            if self.trained:
                chat.refuse_open_thought(request.tokens, text)
            encode = chat.template.encode_demonstration if self.trained else chat.template.encode_reply
            tokens = [*encode(request.tokens, text), *([] if end is None else [end])]
            kept = tokens[: request.sampling.max_tokens]
            n = len(kept)
            return Completion(kept, [0.0] * n, [0] * n, "stop" if n == len(tokens) else "length", text=text)  # type: ignore[arg-type]

        chat.generate = next_reply
        episode = as_trajectories(await self.env.run(task, chat))
        for trajectory in episode:
            trajectory.policy = self.policy
        return episode


class Demonstrate:
    """Gives the prompt, then writes task.data["answer"] as the policy's own tokens: logprobs 0, versions 0.

    `policy` names the writer: "policy" in a supervised phase, `DATA` for a
    demonstration among the policy's own samples. `trained` as GoldEpisode has it.
    """

    def __init__(
        self,
        *,
        suffix: str = "",
        system: str | None = None,
        examples: Sequence[Example] = (),
        policy: str = "policy",
        trained: bool = True,
    ) -> None:
        self.suffix, self.system, self.examples, self.policy = suffix, system, examples, policy
        self.trained = trained

    async def run(self, task: Task, chat: TokenChat) -> Trajectory:
        if "answer" not in task.data:
            raise DataError(f"task {task.id} has no 'answer' to demonstrate; it has: {', '.join(task.data)}")
        chat.give(opening_messages(task, suffix=self.suffix, system=self.system, examples=self.examples))
        if self.trained:
            chat.refuse_open_thought(chat.trajectory.tokens, str(task.data["answer"]))
        split = task.data.get(SPLIT, True)
        chat.write(str(task.data["answer"]), split_special_tokens=split, trained=self.trained)
        chat.trajectory.policy = self.policy
        return chat.trajectory
