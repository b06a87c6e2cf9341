"""Worlds of arrays under Gymnasium's verbs: the policy gets an observation and gives an action, until the world ends.

reset(seed) -> observation ──> engine ──> action ──> step(action) -> observation, reward, terminated, truncated
                     ^─────────────────────────────────────┘           one token of the trajectory for each action

A policy may draw a chunk of actions at once, one token, which the world takes behind each other. What they earn is
earned at that token.

A world steps on the event loop: it takes microseconds there, and a thread for each step would take longer than the
step. For one that is slow the verbs of all episodes run side by side: with `threads` where it lets other threads run
meanwhile, with `processes` where it computes in Python.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from rondel.core.errors import DataError
from rondel.core.protocols import Chat
from rondel.core.types import Request, Task, Trajectory
from rondel.generate.envs.hosted_world import HostedWorld, open_hosted
from rondel.generate.envs.imagination import Imagination
from rondel.generate.envs.stepped_episode import GIVEN, SteppedEpisode
from rondel.generate.envs.tools import on_a_thread
from rondel.generate.envs.world_processes import RemoteWorld, WorldProcesses
from rondel.generate.envs.worlds import WorldSource

World = HostedWorld | RemoteWorld


class Control:
    """`Control(turns=1000)`; which world and which seed is the task's. The score is the sum of its rewards, each earned
    at its action.

    model        what is imagined beside an episode that is trained; None: nothing
    threads      each verb of a world runs on a thread of its own, away from the event loop
    processes    the worlds are shared out among so many processes; 0: they are in this one
    pixels       it shows what it renders, at most so many pixels a side; None: its observation
    instruction  what the policy is told in words, before its first observation; "": nothing
    """

    scores_itself = True

    def __init__(
        self,
        *,
        turns: int = 1000,
        model: Imagination | None = None,
        threads: bool = False,
        processes: int = 0,
        pixels: int | None = None,
        instruction: str = "",
    ) -> None:
        self.turns, self.model, self.threads = turns, model, threads
        self.processes = WorldProcesses(processes) if processes else None
        self.pixels, self.instruction = pixels, instruction
        self.idle: dict[str, list[World]] = {}  # worlds between two episodes: making one is slow

    async def run(self, task: Task, chat: Chat) -> list[Trajectory]:
        source = self.source_of(task)
        kept = self.idle.setdefault(f"{source.name} {source.args}", [])
        while kept and kept[-1].is_lost:
            kept.pop()
        world = kept.pop() if kept else await self._open(source)
        try:
            played = await self._play(task, chat, world)
        except (Exception, asyncio.CancelledError):  # one that broke is never played again
            world.close()
            raise
        kept.append(world)
        beside = [] if self.model is None else await self.model.imagine(played, chat, world.spaces)
        return [played.finish(), *beside]

    def close(self) -> None:
        """End what was started for the worlds."""
        if self.processes is not None:
            self.processes.close()

    def source_of(self, task: Task) -> WorldSource:
        if "world" not in task.data:
            raise DataError(f"task {task.id} names no world: task.data.kind = 'gym' brings them")
        return WorldSource(task.data["world"], dict(task.data.get("args") or {}), self.pixels)

    def instruct(self, chat: Any) -> list[int]:
        """What a policy reads before every observation."""
        if self.instruction:
            chat.give([{"role": "user", "content": self.instruction}])
        else:
            chat.trajectory.extend([GIVEN])
        return list(chat.trajectory.tokens)

    async def _open(self, source: WorldSource) -> World:
        if self.processes is not None:
            return await self.processes.open(source)
        world: World = await self._call(open_hosted, source)
        return world

    async def _play(self, task: Task, chat: Any, world: World) -> SteppedEpisode:
        told, played = self.instruct(chat), SteppedEpisode(chat.trajectory, world.spaces.observed)
        sampling = replace(chat.sampling, max_tokens=1, min_tokens=0)
        last = await self._call(world.reset, task.data["seed"])
        while not played.ended:
            key, policy = chat.key(len(played)), played.trajectory.policy
            done = await chat.generate(Request(told, sampling, key=key, policy=policy, observation=last))
            if done.actions is None:
                raise DataError(
                    'task.env = "control" with a model that writes text: set model.path to a policy of actions'
                )
            last, rewards, ended = await self._call(world.take, done.actions, self.turns - played.taken)
            played.add(done, math.fsum(rewards), last, ended, taken=len(rewards))
        return played

    async def _call(self, function: Callable[..., Any], *given: Any) -> Any:
        """On the event loop, on a thread, or awaited of another process."""

        def call_verb() -> Any:
            return function(*given)

        found = await on_a_thread(call_verb, {}) if self.threads else call_verb()
        return await found if isawaitable(found) else found
