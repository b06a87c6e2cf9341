"""The user played by a model: by a policy of the run, or by any server with OpenAI's chat completions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from rondel.core.types import Score
from rondel.generate.envs.remote_chat import RemoteChat
from rondel.generate.envs.shop.rules import Conduct
from rondel.generate.envs.shop.scripted_user import ASKS, UserReply
from rondel.generate.envs.shop.speech import Speech
from rondel.generate.envs.shop.wishes import FACTS, UserGoal, Wish

USER = "user"  # the agent that plays it
IDENTIFIER = re.compile(r"[\w.]+@[\w.]+\w|(?<!\w)(?:\w+_)?[a-z]?\d{4,}(?!\w)")
UserScore = Literal["goal", "hard", "shared"]


def split_end(text: str, speech: Speech) -> UserReply:
    """What a model wrote: the mark of the end is no part of what the agent reads."""
    return UserReply(text.replace(speech.end, "").strip(), ends=speech.end in text)


class PolicyUser:
    """The agent "user" of the episode, with a conversation of its own: the goal, then what the shop answers."""

    def __init__(self, goal: UserGoal, speech: Speech, chat: Any) -> None:
        self.goal, self.speech, self.chat = goal, speech, chat.beside(USER)
        self.chat.others = True
        self.said: list[str] = []
        self.asked: list[str] = []

    async def reply(self, text: str) -> UserReply:
        brief = "" if self.asked else f"{self.speech.brief(self.goal)}\n"
        self.asked.append(text)
        self.chat.give([{"role": "user", "content": f"{brief}{text}"}])
        done = await self.chat.reply()
        found = split_end(done.text or "", self.speech)
        self.said.append(found.text)
        return UserReply(found.text, found.ends or not done.tokens)

    def score(self, kind: UserScore, conduct: Conduct, agent: Score) -> Score:
        """goal: how well it kept to its goal. hard: that, where the agent failed. shared: what the agent earned."""
        if kind == "shared":
            return Score(agent.value)
        told = told_share(self.goal, self.asked, self.said)
        known = (*self.goal.facts, self.goal.identity, *self.asked)
        facts = {one.lower() for text in known for one in IDENTIFIER.findall(text)}
        invented = any(one.lower() not in facts for text in self.said for one in IDENTIFIER.findall(text))
        kept = told * (not invented) * (not conduct.misled(self.goal))
        parts = {"told": told, "invented": float(invented), "misled": float(conduct.misled(self.goal))}
        return Score(kept if kind == "goal" else kept * (1.0 - agent.value), parts)


def told_share(goal: UserGoal, asked: list[str], said: list[str]) -> float:
    """Of the facts that the agent asked for, the share that the user then told; 1 where nothing was asked."""
    wanted = told = 0
    for question, answer in zip(asked, said, strict=True):
        if "?" not in question:
            continue
        for name, about in ASKS.items():
            known = [wish for wish in goal.wishes if name == "identity" or name in FACTS[wish.kind]]
            if known and re.search(about, question, re.IGNORECASE):
                wanted += 1
                told += any(_mark(name, goal, wish) in answer for wish in known)
    return told / wanted if wanted else 1.0


def _mark(name: str, goal: UserGoal, wish: Wish) -> str:
    """What stands in a message that tells the fact."""
    if name == "identity":
        return goal.identity
    if name == "reason":
        return {"mistake": "mistake", "unneeded": "need"}[wish.reason]
    value = wish.names if name == "items" else getattr(wish, name)
    return str(value if isinstance(value, str) else value[0])


@dataclass
class RemoteUser:
    """A model at "http://127.0.0.1:8000/v1"."""

    goal: UserGoal
    speech: Speech
    server: RemoteChat
    opening: str
    messages: list[dict[str, str]] = field(default_factory=list)

    async def reply(self, text: str) -> UserReply:
        if not self.messages:
            self.messages = [
                {"role": "system", "content": self.speech.brief(self.goal)},
                {"role": "assistant", "content": self.opening},
            ]
        self.messages.append({"role": "user", "content": text})
        said = await self.server.ask(self.messages)
        self.messages.append({"role": "assistant", "content": said})
        return split_end(said, self.speech)
