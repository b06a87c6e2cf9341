"""Worlds of arrays under Gymnasium's verbs: the policy gets an observation and gives an action, until the world ends.

reset(seed) -> observation ──> engine ──> action ──> step(action) -> observation, reward, terminated, truncated
                     ^─────────────────────────────────────┘           one token of the trajectory for each action

A policy may draw a chunk of actions at once, one token, which the world takes behind each other. What they earn is earned
at that token.

A world steps on the event loop: it takes microseconds there, and a thread for each step would take longer than the step.
With `threads`, for a world that is slow, the verbs of all episodes run side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from rondel.core.errors import DataError
from rondel.core.protocols import Chat
from rondel.core.types import Request, Task, Trajectory
from rondel.generate.envs.frame_worlds import open_frame_world
from rondel.generate.envs.imagination import Imagination
from rondel.generate.envs.stepped_episode import GIVEN, SteppedEpisode
from rondel.generate.envs.tools import on_a_thread
from rondel.generate.envs.worlds import WorldSpaces, call_world, open_world


class Control:
    """`Control(turns=1000)`; which world and which seed is the task's. The score is the sum of its rewards, each earned
    at its action.

    model        what is imagined beside an episode that is trained; None: nothing
    threads      each verb of a world runs on a thread of its own, away from the event loop
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
        pixels: int | None = None,
        instruction: str = "",
    ) -> None:
        self.turns, self.model, self.threads = turns, model, threads
        self.pixels, self.instruction = pixels, instruction
        self.idle: dict[str, list[tuple[Any, WorldSpaces]]] = {}  # worlds between two episodes: making one is slow

    async def run(self, task: Task, chat: Chat) -> list[Trajectory]:
        kept = self.idle_worlds(task)
        world, spaces = kept.pop() if kept else await self._call(self.open_world, task)
        played = await self._play(task, chat, world, spaces)
        kept.append((world, spaces))  # one that broke is never played again
        beside = [] if self.model is None else await self.model.imagine(played, chat, spaces)
        return [played.finish(), *beside]

    def idle_worlds(self, task: Task) -> list[tuple[Any, WorldSpaces]]:
        if "world" not in task.data:
            raise DataError(f"task {task.id} names no world: task.data.kind = 'gym' brings them")
        return self.idle.setdefault(f"{task.data['world']} {task.data.get('args')}", [])

    def open_world(self, task: Task) -> tuple[Any, WorldSpaces]:
        name, args = task.data["world"], dict(task.data.get("args") or {})
        return open_world(name, args) if self.pixels is None else open_frame_world(name, args, self.pixels)

    def instruct(self, chat: Any) -> list[int]:
        """What a policy reads before every observation."""
        if self.instruction:
            chat.give([{"role": "user", "content": self.instruction}])
        else:
            chat.trajectory.extend([GIVEN])
        return list(chat.trajectory.tokens)

    async def _play(self, task: Task, chat: Any, world: Any, spaces: WorldSpaces) -> SteppedEpisode:
        name, told = task.data["world"], self.instruct(chat)
        played = SteppedEpisode(chat.trajectory, spaces.observed)
        sampling = replace(chat.sampling, max_tokens=1, min_tokens=0)
        shown, _ = await self._call(call_world, name, world.reset, seed=task.data["seed"])
        last = spaces.flatten(shown)
        while not played.ended:
            request = Request(
                told, sampling, key=chat.key(len(played)), policy=played.trajectory.policy, observation=last
            )
            done = await chat.generate(request)
            if done.actions is None:
                raise DataError(
                    'task.env = "control" with a model that writes text: set model.path to a policy of actions'
                )
            take = partial(call_world, name, world.step)
            left = self.turns - played.taken
            shown, rewards, ended = await self._call(take_actions, take, map(spaces.action, done.actions), left)
            last = spaces.flatten(shown)
            played.add(done, math.fsum(rewards), last, ended, taken=len(rewards))
        return played

    async def _call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        def call_verb() -> Any:
            return function(*given, **named)

        return await on_a_thread(call_verb, {}) if self.threads else call_verb()


def take_actions(step: Callable[[Any], Any], actions: Iterable[Any], left: int) -> tuple[Any, list[float], str]:
    """-> what the world shows behind the last action that it took, what each was paid, and whether it has "ended" the
    episode or it is "cut off", by the world or because none is left; "" while it goes on."""
    rewards, ended, shown = list[float](), "", None
    for action in actions:
        shown, reward, terminated, truncated, _ = step(action)
        rewards.append(float(reward))
        if ended := "ended" if terminated else "cut off" if truncated or len(rewards) >= left else "":
            break
    return shown, rewards, ended
