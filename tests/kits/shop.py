"""The shop of `rondel tasks shop`, its tasks, and an agent that says what it is given: no engine, no tokens."""

from __future__ import annotations

import asyncio
from functools import cache

from rondel.core.types import Completion, Task, Trajectory
from rondel.generate.calls import HERMES, read_calls
from rondel.generate.envs.shop.database import ShopDatabase
from rondel.generate.envs.shop.env import Shop
from rondel.generate.envs.shop.generator import make_database
from rondel.generate.envs.shop.task_set import make_tasks


@cache
def database() -> ShopDatabase:
    return make_database(0)


@cache
def tasks(count: int = 200) -> list[Task]:
    return [Task(f"shop/{i}", "shop", row) for i, row in enumerate(make_tasks(database(), count))]


@cache
def env(short: bool = False) -> Shop:
    return Shop(database(), short=short)


def task_of(family: str, **wanted) -> Task:
    """The first task of a family whose first wish has these fields."""
    found = (t for t in tasks() if t.data["family"] == family)
    return next(t for t in found if all(t.data["goal"]["wishes"][0][name] == value for name, value in wanted.items()))


class SaidChat:
    """A chat whose policy says the given replies; `log` is the conversation. Behind the last one it says nothing."""

    def __init__(self, replies):
        self.replies, self.trajectory, self.log, self.asked = list(replies), Trajectory(), [], 0

    def give(self, messages, tools=()):
        self.log += [(m["role"], m["content"]) for m in messages]

    async def reply(self):
        text = self.replies[self.asked] if self.asked < len(self.replies) else ""
        self.asked += 1
        self.log.append(("assistant", text))
        return Completion([1], [0.0], [0], "stop", text=text)

    async def calls(self, done):
        return read_calls(HERMES, done.text)


def play(task: Task, replies, *, short: bool = False) -> SaidChat:
    """One episode; its score is chat.trajectory.score."""
    return play_all([task], [replies], short=short)[0]


def play_all(asked, replies, *, short: bool = False) -> list[SaidChat]:
    """An episode for each task, in one event loop."""
    chats = [SaidChat(own) for own in replies]

    async def all_of_them():
        for task, chat in zip(asked, chats, strict=True):
            await env(short).run(task, chat)

    asyncio.run(all_of_them())
    return chats
