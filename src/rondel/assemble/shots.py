"""task.env.shots: training tasks that are played with their gold replies and stand before every prompt."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, DataError, RondelError, error_text
from rondel.core.protocols import GoldEnv
from rondel.core.types import Completion, Request, Sampling, Task
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.demonstrations import Demonstrate, GoldEpisode
from rondel.generate.envs.sent_messages import sent_messages
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import TaskSet
from rondel.generate.template import Messages
from rondel.models.load import tokenizer_of


def play_shots(job: Job, tasks: TaskSet, env: Any, sampling: Sampling) -> dict[str, Messages]:
    """The messages of `tasks.shots` for each agent, without those of a system. ConfigError where the environment knows
    no replies that deserve the best score.
    """
    if not tasks.shots:
        return {}
    if not isinstance(env, GoldEnv | SingleTurn):
        raise ConfigError(
            f'task.env.shots: "{job.task.env_kind}" knows no replies to show. An environment of yours tells them as '
            "gold(task); for others write the messages into the tasks, and leave shots out"
        )
    tokenizer, context, sight = tokenizer_of(job.model.path)

    async def play_all() -> dict[str, Messages]:
        shown: dict[str, Messages] = {}
        for task in tasks.shots:
            chat = TokenChat(
                tokenizer, _refuse_generation, sampling=sampling, key=lambda turn: 0, max_context=context, sight=sight
            )
            for agent, messages in (await _play_gold(job, env, task, chat)).items():
                shown[agent] = [*shown.get(agent, ()), *messages]
        return shown

    with ThreadPoolExecutor(1) as apart:  # in a notebook an event loop runs already
        return apart.submit(asyncio.run, play_all()).result()


async def _play_gold(job: Job, env: Any, task: Task, chat: TokenChat) -> dict[str, Messages]:
    """One task, as {agent: messages}."""
    section = job.task
    gold = (
        GoldEpisode(env, trained=False)
        if isinstance(env, GoldEnv)
        else Demonstrate(suffix=section.suffix, trained=False)
    )
    try:
        await gold.run(task, chat)
    except RondelError:
        raise
    except Exception as error:
        raise DataError(
            f"task.env.shots: the environment broke at {task.id}, played as gold: {error_text(error)}"
        ) from error
    shown: dict[str, Messages] = {}
    for one in chat.episode.chats or [chat]:
        if one.trajectory.finish_reason == "length":
            raise ConfigError(
                f"task.env.shots: the gold replies of {task.id} do not fit into engine.sampling.max_tokens = "
                f"{one.sampling.max_tokens}, or into the model's context of {one.max_context}"
            )
        messages = sent_messages(one.sent, one.template, tools=one.tools)
        shown[one.trajectory.agent] = [m for m in messages if m["role"] != "system"]
    return shown


async def _refuse_generation(request: Request) -> Completion:
    raise AssertionError("gold replies are written, not sampled")
