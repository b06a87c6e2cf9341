"""Worlds of arrays under Gymnasium's verbs: the policy gets an observation and gives an action, until the world ends.

reset(seed) -> observation ──> engine ──> action ──> step(action) -> observation, reward, terminated, truncated
                     ^─────────────────────────────────────┘           one token of the trajectory for each action

A policy may draw a chunk of actions at once, one token, which the world takes behind each other. What they earn is earned
at that token.

A world steps on the event loop: it takes microseconds there, and a thread for each step would take longer than the step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rondel.core.errors import DataError
from rondel.core.protocols import Chat
from rondel.core.types import Request, Task, Trajectory
from rondel.generate.envs.imagination import Imagination
from rondel.generate.envs.stepped_episode import GIVEN, SteppedEpisode
from rondel.generate.envs.worlds import WorldSpaces, call_world, open_world


class Control:
    """`Control(turns=1000)`; which world and which seed is the task's. The score is the sum of its rewards, each earned
    at its action.

    model  what is imagined beside an episode that is trained; None: nothing
    """

    scores_itself = True

    def __init__(self, *, turns: int = 1000, model: Imagination | None = None) -> None:
        self.turns, self.model = turns, model
        self.idle: dict[str, list[tuple[Any, WorldSpaces]]] = {}  # worlds between two episodes: making one is slow

    async def run(self, task: Task, chat: Chat) -> list[Trajectory]:
        if "world" not in task.data:
            raise DataError(f"task {task.id} names no world: task.data.kind = 'gym' brings them")
        key = f"{task.data['world']} {task.data.get('args')}"
        kept = self.idle.setdefault(key, [])
        world, spaces = kept.pop() if kept else open_world(task.data["world"], dict(task.data.get("args") or {}))
        played = await self._play(task, chat, world, spaces)
        kept.append((world, spaces))  # one that broke is never played again
        beside = [] if self.model is None else await self.model.imagine(played, chat, spaces)
        return [played.finish(), *beside]

    async def _play(self, task: Task, chat: Any, world: Any, spaces: WorldSpaces) -> SteppedEpisode:
        name, played = task.data["world"], SteppedEpisode(chat.trajectory, spaces.observed)
        sampling = replace(chat.sampling, max_tokens=1, min_tokens=0)
        shown, _ = call_world(name, world.reset, seed=task.data["seed"])
        last = spaces.flatten(shown)
        while not played.ended:
            request = Request(
                [GIVEN], sampling, key=chat.key(len(played)), policy=played.trajectory.policy, observation=last
            )
            done = await chat.generate(request)
            if done.actions is None:
                raise DataError(
                    'task.env = "control" with a model that writes text: set model.path to a policy of actions'
                )
            rewards, ended = list[float](), ""
            for action in done.actions:
                shown, reward, terminated, truncated, _ = call_world(name, world.step, spaces.action(action))
                rewards.append(float(reward))
                cut = truncated or played.taken + len(rewards) >= self.turns
                if ended := "ended" if terminated else "cut off" if cut else "":
                    break
            last = spaces.flatten(shown)
            played.add(done, math.fsum(rewards), last, ended, taken=len(rewards))
        return played
