"""Several agents, with one policy or several: an episode is a graph of turns, and a turn
is an agent's reply to what others have said.

    writer ──> critic ──> final      agents = [{ agent = "writer", says = "{prompt}" },
      └─────────────────────^                  { agent = "critic", says = "{prompt}\\nAnswer: {writer}\\nWhat is wrong
                                               with it?" }, { agent = "writer", turn = "final", says = "A critic said:
                                               {critic}" }]

Every agent has a conversation of its own, in the order of the list; turns that do not wait
for each other run side by side. The last turn of the list is the answer that the reward
judges, and all agents share its score (MARFT,
arXiv:2504.16129: credit over the whole episode); each is compared with the same agent in the other
episodes. A list with one turn is `single_turn` to the bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from string import Formatter
from typing import Any

from rondel.core.errors import ConfigError, DataError, unwrap_exception_group
from rondel.core.media import message_text
from rondel.core.registry import suggest_name
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.template import Messages, Schemas

PROMPT = "prompt"  # in `says`: what task.data's "prompt" or "messages" ask


@dataclass(frozen=True)
class AgentTurn:
    """`says` is what the agent reads then: fields of the task and what other turns were answered, in braces."""

    agent: str
    says: str
    turn: str
    system: str | None = None

    @property
    def referenced_names(self) -> list[str]:
        return [name for _, name, _, _ in Formatter().parse(self.says) if name is not None]


class Agents:
    """`Agents([{"agent": "writer", "says": "{prompt}"}, ...])`."""

    def __init__(self, turns: Iterable[dict[str, Any]], *, suffix: str = "", system: str | None = None) -> None:
        self.list = [_read_turn(number, dict(turn)) for number, turn in enumerate(turns, 1)]
        self.suffix, self.system = suffix, system
        names = [turn.turn for turn in self.list]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"task.env.agents: two turns are called '{min(twice)}'; an agent's later turns need a name: turn = "
                f'"final"'
            )
        self.waits = self._turn_dependencies()
        try:
            TopologicalSorter(self.waits).prepare()
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            raise ConfigError(
                f"task.env.agents: {circle}: each of these waits for the one before, so none can begin"
            ) from error
        speaks = [turn.agent for turn in self.list]
        self.agents = list(dict.fromkeys(speaks))
        self.answering, self.turns = speaks[-1], max(speaks.count(agent) for agent in speaks)

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        """What the first turn reads; the others' texts are not known before."""
        first = self.list[0]
        return self._turn_messages(first, task, dict.fromkeys(self.waits, ""), {first.agent}), ()

    async def run(self, task: Task, chat: TokenChat) -> list[Trajectory]:
        """-> the answering agent's trajectory, then those of the others."""
        chat.trajectory.agent = self.answering
        chats = {turn.agent: chat if turn.agent == self.answering else chat.beside(turn.agent) for turn in self.list}
        new = set(chats)
        ended = {turn.turn: asyncio.Event() for turn in self.list}
        said: dict[str, str] = {}

        async def run_turn(turn: AgentTurn) -> None:
            for name in self.waits[turn.turn]:
                await ended[name].wait()
            own = chats[turn.agent]
            own.others = own.others or any(name in said for name in turn.referenced_names)
            own.give(self._turn_messages(turn, task, said, new))
            new.discard(turn.agent)
            said[turn.turn] = (await own.reply()).text or ""
            ended[turn.turn].set()

        with unwrap_exception_group():
            async with asyncio.TaskGroup() as together:
                for turn in self.list:
                    together.create_task(run_turn(turn))
        return [
            chats[self.answering].trajectory,
            *(own.trajectory for agent, own in chats.items() if agent != self.answering),
        ]

    def _turn_dependencies(self) -> dict[str, list[str]]:
        """Whom each turn waits for: those it reads, and its agent's turn before."""
        waits: dict[str, list[str]] = {}
        last: dict[str, str] = {}
        known = {turn.turn for turn in self.list}
        for turn in self.list:
            before = [last[turn.agent]] if turn.agent in last else []
            waits[turn.turn] = [*before, *(name for name in turn.referenced_names if name in known)]
            last[turn.agent] = turn.turn
        return waits

    def _turn_messages(self, turn: AgentTurn, task: Task, said: dict[str, str], new: set[str]) -> Messages:
        """The messages of one turn. `new`: agents that have not spoken yet, who get their system message."""
        begins = turn.agent in new
        system = turn.system if turn.system is not None else self.system
        if turn.says == "{prompt}" and begins:
            return opening_messages(task, suffix=self.suffix, system=system)
        values = {
            name: said[name] if name in said else self._task_field(turn, task, name) for name in turn.referenced_names
        }
        words = {"role": "user", "content": turn.says.format(**values) + self.suffix}
        return [{"role": "system", "content": system}, words] if begins and system is not None else [words]

    def _task_field(self, turn: AgentTurn, task: Task, name: str) -> Any:
        if name == PROMPT:
            return "\n".join(message_text(m["content"]) for m in opening_messages(task))
        if name not in task.data:
            known = [*task.data, *self.waits]
            raise DataError(
                f"task.env.agents: turn '{turn.turn}' reads {{{name}}}, and task {task.id} has no such "
                f"field.{suggest_name(name, known)}"
            )
        return task.data[name]


def _read_turn(number: int, given: dict[str, Any]) -> AgentTurn:
    where = f"task.env.agents[{number}]"
    for key in given.keys() - {"agent", "says", "turn", "system"}:
        raise ConfigError(f"{where} has no setting '{key}'.{suggest_name(key, ['agent', 'says', 'turn', 'system'])}")
    if not all(isinstance(given.get(key), str) and given[key] for key in ("agent", "says")):
        raise ConfigError(f'{where} needs agent = "a name" and says = "what it reads: {{prompt}}"')
    turn = AgentTurn(given["agent"], given["says"], given.get("turn", given["agent"]), given.get("system"))
    try:
        odd = next((name for name in turn.referenced_names if not name.isidentifier()), None)
    except ValueError as error:
        raise ConfigError(
            f"{where}.says: {error}; a brace of the text itself is written twice: {{{{ or }}}}"
        ) from error
    if odd is not None:
        raise ConfigError(f"{where}.says reads {{{odd}}}; between braces stands the name of a field or a turn")
    return turn
