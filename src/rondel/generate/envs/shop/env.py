"""Customer service in a shop: the agent talks to a user, calls tools on a database, and keeps the rules of the shop.

opening -> reply ──calls──> results ─┐      the episode ends when the user leaves, a human takes over, or the turns are
             ^    └─text──> user ────┤      over; the score compares the database with the one that the right calls leave
             └───────────────────────┘
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from rondel.core.errors import EnvError
from rondel.core.protocols import AskedCall
from rondel.core.types import Completion, Task, Trajectory
from rondel.generate.envs.remote_chat import RemoteChat
from rondel.generate.envs.shop.database import ShopDatabase, ShopSession
from rondel.generate.envs.shop.gold import gold_of_both, gold_replies
from rondel.generate.envs.shop.line_calls import read_line_calls
from rondel.generate.envs.shop.model_user import USER, PolicyUser, RemoteUser, UserScore
from rondel.generate.envs.shop.rules import POLICY, Conduct, grade
from rondel.generate.envs.shop.scripted_user import ScriptedUser, UserReply
from rondel.generate.envs.shop.speech import PlainSpeech, ShortSpeech, Speech
from rondel.generate.envs.shop.tools import ShopTools
from rondel.generate.envs.shop.wishes import UserGoal
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.envs.tools import Tool, Tools
from rondel.generate.template import Messages, Schemas

AGENT = "agent"


class UserSimulator(Protocol):
    async def reply(self, text: str) -> UserReply: ...


class Shop(Tools):
    """`Shop(open_database("runs/shop"))`; tasks are those of task.data.kind = "shop_tasks".

    replies     most replies of the agent; `turns` counts those of a user that is a policy, too
    short       the words of ShortSpeech, and calls as lines, for models that read letters and no language
    user        "scripted", "policy": the agent "user" of the run, or the address of a server with OpenAI's API
    user_model  the server's name of the model
    user_score  what a policy earns as the user
    """

    scores_itself = True
    maximum = 1.0

    def __init__(
        self,
        database: ShopDatabase,
        *,
        turns: int = 20,
        short: bool = False,
        user: str = "scripted",
        user_model: str = "",
        user_score: UserScore = "goal",
        **settings: Any,
    ) -> None:
        played = user == "policy"
        super().__init__([ShopTools(ShopSession(database))], turns=turns * (1 + played), **settings)
        self.database, self.short, self.replies = database, short, turns
        self.user, self.user_model, self.user_score = user, user_model, user_score
        self.agents = (AGENT, USER) if played else (AGENT,)
        self.speech: Speech = ShortSpeech() if short else PlainSpeech()
        self.schemas = [tool.schema for tool in self.shared.values()]

    def prompt(self, task: Task, tools: dict[str, Tool] | None = None) -> tuple[Messages, Schemas]:
        """The rules of the shop, or task.system; what the user says first; and the tools."""
        if self.short:
            opening = {"role": "user", "content": self.speech.opening(_goal_of(task)) + self.suffix}
            system: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
            return [*system, opening], ()
        system_text = POLICY if self.system is None else self.system
        return opening_messages(task, suffix=self.suffix, system=system_text), self.schemas

    async def run(self, task: Task, chat: Any) -> Trajectory | list[Trajectory]:  # type: ignore[override]  # of two agents
        goal, session = _goal_of(task), ShopSession(self.database)
        conduct, tools = Conduct(session), self._bind(ShopTools(session))
        chat.trajectory.agent = AGENT
        messages, schemas = self.prompt(task)
        user = self.open_user(goal, messages[-1]["content"], chat)
        conduct.user_said(messages[-1]["content"])
        chat.give(messages, schemas)
        for left in reversed(range(self.replies)):
            done = await chat.reply()
            if done.finish_reason == "length":
                break
            if calls := await self._read_calls(done, chat):
                results = [await self._carry_out(call, tools, conduct) for call in calls]
                if session.transferred or not left:
                    break
                chat.give(self._result_messages(calls, results))
                continue
            conduct.agent_said(done.text or "")
            if not left or (said := await user.reply(done.text or "")).ends:
                break
            conduct.user_said(said.text)
            chat.give([{"role": "user", "content": said.text}])
        chat.trajectory.score = score = grade(conduct, goal)
        if not isinstance(user, PolicyUser) or not user.said:
            return chat.trajectory
        user.chat.trajectory.score = user.score(self.user_score, conduct, score)
        return [chat.trajectory, user.chat.trajectory]

    def open_user(self, goal: UserGoal, opening: str, chat: Any) -> UserSimulator:
        """The user of one episode."""
        if self.user == "scripted":
            return ScriptedUser(goal, self.speech)
        if self.user == "policy":
            return PolicyUser(goal, self.speech, chat)
        server = RemoteChat(self.user, self.user_model, "task.env.user", self.timeout)
        return RemoteUser(goal, self.speech, server, opening)

    def gold(self, task: Task) -> list[str]:
        """The replies of an agent that does everything right; between them those of a user that is a policy."""
        goal = _goal_of(task)
        replies = gold_replies(goal, self.database, self.speech)
        return gold_of_both(replies, ScriptedUser(goal, self.speech)) if self.user == "policy" else replies

    async def _read_calls(self, done: Completion, chat: Any) -> Sequence[AskedCall]:
        return read_line_calls(done.text or "") if self.short else await super()._read_calls(done, chat)

    def _result_messages(self, calls: Sequence[AskedCall], results: list[str]) -> Messages:
        """What tools returned; the marks that templates write around it are many letters for a model
        that reads letters."""
        if self.short:
            return [{"role": "user", "content": "\n".join(results)}]
        return [{"role": "tool", "name": call.name, "content": text} for call, text in zip(calls, results)]

    def _bind(self, desk: ShopTools) -> dict[str, Tool]:
        """The tools on the session of one episode; their schemas are made once."""
        bound = {}
        for name, tool in self.shared.items():
            bound[name] = copy.copy(tool)
            bound[name].function = _awaitable(getattr(desk, name), partial(self._show, name))
        return bound

    def _show(self, name: str, result: Any) -> str:
        return self.speech.result(name, result, self.database)

    async def _carry_out(self, call: AskedCall, tools: dict[str, Tool], conduct: Conduct) -> str:
        broken = conduct.before_call(call.name, call.arguments)
        result = str(await self.carry_out(call, tools))
        if not result.startswith("error: "):
            conduct.broken |= broken
            conduct.after_call(call.name, call.arguments)
        return result


def _awaitable(method: Callable[..., Any], show: Callable[[Any], str]) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: Any) -> str:
        return show(method(**arguments))

    return call


def _goal_of(task: Task) -> UserGoal:
    if not isinstance(task.data.get("goal"), dict):
        raise EnvError(f'{task.id} has no goal: task.env "shop" plays task.data.kind = "shop_tasks"')
    return UserGoal.read(task.data["goal"])
