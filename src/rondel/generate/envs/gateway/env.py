"""An agent of somebody else's, trained through the API that it speaks: only its `base_url` and `api_key` are ours.

agent(task, base_url, api_key) ──HTTP──> session of this key ──> chat ──> engine
         │                                  └ branches: what is trained
         └──> nothing, or what the episode was worth
"""

from __future__ import annotations

import asyncio

from rondel.core.errors import ConfigError, EnvError, unwrap_exception_group
from rondel.core.events import Warned, emit
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.gateway.agent import Agent, score_of
from rondel.generate.envs.gateway.session import GatewaySession
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.template import Messages, Schemas


class Gateway:
    """`Gateway(agent_of("my_agent:solve"), timeout=600)`; `timeout` is the seconds of one episode.

    An agent that outlives its timeout is a fault; one that outlives the seconds of the episode's budget is ended, and
    what it had the policy write is scored as any episode is whose budget is used up.
    """

    turns = 1 << 20  # who knows: room is planned for conversations as long as the context

    def __init__(self, agent: Agent, *, timeout: float = 600.0) -> None:
        self.agent, self.timeout = agent, timeout
        self._told: set[str] = set()
        try:
            from rondel.generate.envs.gateway.port import GatewayListener
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"task.env = 'gateway' needs {error.name}, which is not installed: pip install 'rondel[serve]'"
            ) from error
        self.listening = GatewayListener(self._warn_once)

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        """What the policy reads first is the agent's affair; a prompt of the task is most likely in it."""
        known = {"prompt", "messages"} & task.data.keys()
        return opening_messages(task) if known else [{"role": "user", "content": ""}], ()

    async def run(self, task: Task, chat: TokenChat) -> Trajectory | list[Trajectory]:
        """One trajectory, or one for each branch: the first opened comes first, and has
        the score if the agent says one.
        """
        session, failed, returned = GatewaySession(chat), None, None
        budget = chat.episode.budget
        if budget is not None:
            budget.begin()
        left = None if budget is None else budget.seconds_left()
        async with self.listening.serve_session(session) as (url, key):
            try:
                async with asyncio.timeout(self.timeout if left is None else min(left, self.timeout)) as limit:
                    with unwrap_exception_group():
                        returned = await self.agent(task, url, key)
            except TimeoutError as error:
                if budget is not None and left is not None and left < self.timeout and limit.expired():
                    budget.over = budget.over or "seconds"
                reason = (
                    f"did not end within {self.timeout:g} s (task.env.timeout)"
                    if limit.expired()
                    else f"raised {error!r}"
                )
                failed = EnvError(f"the agent {reason}")
            except EnvError as error:
                failed = error
            except Exception as error:  # an agent raises whatever it likes
                failed = EnvError(f"the agent raised {type(error).__name__}: {error}")
                failed.__cause__ = error
        if session.fault is not None:
            raise session.fault
        ended = session.full or chat.episode.is_out_of_budget  # an agent may well fail then: that is the policy's doing
        if failed is not None and not ended:
            raise failed
        found = session.forest.leaf_trajectories()
        if not found:
            why = "; its first prompt alone fills the context" if session.full else ""
            raise EnvError(f"the agent ended without an answer of the policy{why}") from failed
        found[0].score = score_of(returned)  # of the episode: its other branches share it
        return found[0] if len(found) == 1 else found

    def _warn_once(self, name: str, rule: str) -> None:
        """Once for each name in a run."""
        if name not in self._told:
            self._told.add(name)
            emit(Warned(f"the agent asks for {name}: {rule}"))
