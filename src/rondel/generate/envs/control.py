"""Worlds of arrays under Gymnasium's verbs: the policy gets an observation and gives an action, until the world ends.

reset(seed) -> observation ──> engine ──> action ──> step(action) -> observation, reward, terminated, truncated
                     ^─────────────────────────────────────┘           one token of the trajectory for each action

A world steps on the event loop: it takes microseconds there, and a thread for each step would take longer than the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import DataError, EnvError
from rondel.core.protocols import Chat
from rondel.core.types import Request, Score, Task, Trajectory
from rondel.generate.envs.worlds import WorldSpaces, open_world

GIVEN = 0  # the token before the first action, which a trajectory must begin with


class Control:
    """`Control(turns=1000)`; which world and which seed is the task's. The score is the sum of its rewards, each earned
    at its action.
    """

    scores_itself = True

    def __init__(self, *, turns: int = 1000) -> None:
        self.turns = turns
        self.idle: dict[str, list[tuple[Any, WorldSpaces]]] = {}  # worlds between two episodes: making one is slow

    async def run(self, task: Task, chat: Chat) -> Trajectory:
        if "world" not in task.data:
            raise DataError(f"task {task.id} names no world: task.data.kind = 'gym' brings them")
        key = f"{task.data['world']} {task.data.get('args')}"
        kept = self.idle.setdefault(key, [])
        world, spaces = kept.pop() if kept else open_world(task.data["world"], dict(task.data.get("args") or {}))
        trajectory = await self._play(task, chat, world, spaces)
        kept.append((world, spaces))  # one that broke is never played again
        return trajectory

    async def _play(self, task: Task, chat: Any, world: Any, spaces: WorldSpaces) -> Trajectory:
        name, t = task.data["world"], chat.trajectory
        sampling = replace(chat.sampling, max_tokens=1, min_tokens=0)
        shown, _ = _call(name, world.reset, seed=task.data["seed"])
        rows, rewards = list[np.ndarray](), list[float]()
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        ended, last = "", spaces.flatten(shown)
        while not ended:
            request = Request([GIVEN], sampling, key=chat.key(len(rows)), policy=t.policy, observation=last)
            done = await chat.generate(request)
            if done.steps is None:
                raise DataError(
                    'task.env = "control" with a model that writes text: set model.path to a policy of actions'
                )
            tokens.append(done.tokens[0])
            logprobs.append(done.logprobs[0])
            versions.append(done.versions[0])
            rows.append(done.steps.rows[0])
            shown, reward, terminated, truncated, _ = _call(name, world.step, spaces.action(done.steps.drawn[0]))
            rewards.append(float(reward))
            last = spaces.flatten(shown)
            ended = "ended" if terminated else "cut off" if truncated or len(rows) >= self.turns else ""
        steps = ContinuousSteps(np.stack(rows), spaces.observed, last if ended == "cut off" else None)
        t.extend([GIVEN])
        t.extend(tokens, logprobs=logprobs, versions=versions, steps=steps)
        t.score = Score(math.fsum(rewards), steps=tuple(enumerate(rewards, 1)))
        t.finish_reason = "stop" if ended == "ended" else "length"
        t.text = f"{len(rows)} steps, return {t.score.value:g}, {ended}"
        return t


def _call(name: str, verb: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return verb(*given, **named)
    except Exception as error:  # a world raises whatever it likes
        what = getattr(verb, "__name__", "a verb")
        raise EnvError(f"{what} of the world '{name}' raised {type(error).__name__}: {error}") from error
