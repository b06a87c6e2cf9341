"""Episodes in a repository: the policy reads a statement, works on the files in a box, and is graded by hidden tests.

give(statement, tools) -> reply -> calls in the box -> reply ... -> files of the box -> grade in a fresh box
agent in the box -> asks the gateway, whom the policy answers ...  -> files of the box -> grade in a fresh box
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rondel.core.errors import DataError, EnvError, SandboxError
from rondel.core.protocols import SandboxFactory
from rondel.core.types import Score, Task, Trajectory
from rondel.generate.envs.repository.box_agent import agent_variables, run_agent
from rondel.generate.envs.repository.grader import Changes, grade, known_sums
from rondel.generate.envs.repository.reader import load_task
from rondel.generate.envs.repository.task import RepositoryTask
from rondel.generate.envs.repository.tools import RepositoryTools
from rondel.generate.envs.repository.tree import read_tree
from rondel.generate.envs.repository.workspace import OWN, Workspace, open_workspace
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.envs.tools import Tool, Tools, resolve_tools
from rondel.generate.template import Messages, Schemas

LATE = 90.0  # seconds that a call may take beyond those of its command: its box starts with the first one
AGENT = f"{OWN}/agent"
KEPT = 16  # tasks in memory


class RepositoryEnv:
    """`RepositoryEnv(Sandbox(), turns=30)`; tasks are those of task.data.kind = "repository".

    turns          most replies of the policy
    seconds        wall clock of one command
    output         characters that the policy reads of one call
    agent          a command that works in the box and asks the policy over HTTP: then there are no tools
    gateway        where the agent asks: a `Gateway` for its episodes, needed with an agent
    agent_files    a folder that is copied into the box for it; {files} in the command is where
    agent_seconds  its wall clock
    shown          folders of this machine that the box may read
    """

    scores_itself = True

    def __init__(
        self,
        sandbox: SandboxFactory,
        *,
        turns: int = 30,
        seconds: float = 60.0,
        output: int = 6000,
        suffix: str = "",
        system: str | None = None,
        gateway: Any = None,
        agent: Sequence[str] = (),
        agent_files: Path | None = None,
        agent_seconds: float = 600.0,
        shown: tuple[str, ...] = (),
    ) -> None:
        self.sandbox, self.turns, self.seconds, self.output = sandbox, turns, seconds, output
        self.suffix, self.system, self.shown = suffix, system, shown
        self.agent, self.agent_seconds = [word.replace("{files}", AGENT) for word in agent], agent_seconds
        self._agent_files = {} if agent_files is None else read_tree(agent_files)
        self._load: Callable[[str], RepositoryTask] = lru_cache(KEPT)(load_task)
        self._untouched: dict[str, Score] = {}
        self._gateway = gateway
        if gateway is not None:
            self.turns = gateway.turns

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        """The statement, and the tools it is offered."""
        return opening_messages(task, suffix=self.suffix, system=self.system), () if self.agent else SCHEMAS

    async def run(self, task: Task, chat: Any) -> Trajectory | list[Trajectory]:
        own = await self._task_of(task)
        if self._gateway is not None:
            gateway, left = copy.copy(self._gateway), list[Changes]()  # one port for all episodes
            gateway.agent = partial(self._run_agent, own, chat, left)
            found: Trajectory | list[Trajectory] = await gateway.run(task, chat)
            first = found[0] if isinstance(found, list) else found
            # also where the agent failed for want of context or budget, which the gateway takes for the policy's doing
            first.score = await self._score(task, own, left[0] if left else None)
            return found
        make = partial(open_workspace, own, self.sandbox, seconds=self.seconds, shown=self.shown)
        held = RepositoryTools(own, make, most=self.output)
        tools = Tools([held], turns=self.turns, timeout=self.seconds + LATE, suffix=self.suffix, system=self.system)
        try:
            trajectory = await tools.run(task, chat)
            trajectory.score = await self._score(task, own, await asyncio.to_thread(held._changes))
        finally:
            held.close()
        return trajectory

    async def _run_agent(
        self, own: RepositoryTask, chat: Any, left: list[Changes], task: Task, url: str, key: str
    ) -> None:
        """One episode of the agent's. What it changed comes into `left`, where it came to an end."""
        box: Workspace = await asyncio.to_thread(
            open_workspace,
            own,
            self.sandbox,
            seconds=self.seconds,
            shown=self.shown,
            more=[(AGENT, self._agent_files)],
        )
        try:
            env = agent_variables(own.statement, own.name, box.root, key)
            ran = await run_agent(box, self.agent, env, url, self.agent_seconds)
            folder = ""
            if not ran.limit:
                with suppress(OSError, SandboxError):  # the policy may have filled its disk
                    changes, folder = await asyncio.to_thread(box.state, known_sums(own.files))
                    left.append(changes)
            if not ran.ok:
                said = ran.stderr.decode(errors="replace").strip()[-500:] or "it said nothing"
                raise EnvError(f"the agent's command {self.agent} ended with {ran.ended}: {said}")
            chat.log_command(["agent", self.agent], exit=ran.exit, folder=folder)
        finally:
            await asyncio.to_thread(box.close)

    async def _task_of(self, task: Task) -> RepositoryTask:
        spec = task.data.get("repository")
        if not isinstance(spec, str):
            raise EnvError(f'{task.id} is no repository: task.env "repository" plays task.data.kind = "repository"')
        try:
            return await asyncio.to_thread(self._load, spec)
        except DataError as error:  # it could be read when the run began
            raise EnvError(str(error)) from error

    async def _score(self, task: Task, own: RepositoryTask, changes: Changes | None) -> Score:
        """What the files are worth; those of a box that does not give them are worth what was there at first."""
        if changes:
            return await asyncio.to_thread(grade, own, changes, self.sandbox)
        if task.id not in self._untouched:
            self._untouched[task.id] = await asyncio.to_thread(grade, own, {}, self.sandbox)
        score = self._untouched[task.id]
        return Score(score.value, dict(score.parts))


def _schemas() -> list[dict[str, Any]]:
    """Of the tools, which are the same in every episode: no box is needed for them."""
    unopened: Any = None
    tools: list[Tool] = resolve_tools(RepositoryTools(unopened, unopened))
    return [tool.schema for tool in tools]


SCHEMAS = _schemas()
