"""Worlds of arrays under Gymnasium's verbs: the policy gets an observation and gives an action, until the world ends.

reset(seed) -> observation ──> engine ──> action ──> step(action) -> observation, reward, terminated, truncated
                     ^─────────────────────────────────────┘           one token of the trajectory for each action

A world steps on the event loop: it takes microseconds there, and a thread for each step would take longer than the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import ConfigError, DataError, EnvError
from rondel.core.protocols import Chat
from rondel.core.types import Request, Score, Task, Trajectory
from rondel.generate.envs.gym import world_factory

GIVEN = 0  # the token before the first action, which a trajectory must begin with


@dataclass(frozen=True, slots=True)
class WorldSpaces:
    """What a world shows and takes, as numbers.

    observed  O, numbers of an observation, laid flat
    actions   A, of how many actions one is chosen (`discrete`), or how many numbers an action has
    first     number that the world gives its first action
    low, high [A] bounds of an action, at which it is cut; None where actions are counted
    shape     in which the world takes an action
    """

    observed: int
    actions: int
    discrete: bool
    observation_space: Any
    first: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, world: Any) -> WorldSpaces:
        """ConfigError where a policy of arrays cannot play it."""
        from gymnasium import spaces

        seen, taken = getattr(world, "observation_space", None), getattr(world, "action_space", None)
        if not isinstance(seen, spaces.Space) or not seen.is_np_flattenable:
            raise ConfigError(
                f"the world '{name}' shows {seen}, and a policy of arrays reads a space of gymnasium that can be laid "
                'flat (Box, Discrete, MultiBinary, or a Dict or Tuple of these): for text, set task.env = "gym"'
            )
        observed = spaces.flatdim(seen)
        if isinstance(taken, spaces.Discrete):
            return cls(observed, int(taken.n), True, seen, first=int(taken.start))
        if isinstance(taken, spaces.Box) and np.issubdtype(taken.dtype, np.floating):
            low, high = (np.asarray(side, np.float32).reshape(-1) for side in (taken.low, taken.high))
            return cls(observed, len(low), False, seen, low=low, high=high, shape=taken.shape)
        raise ConfigError(f"the world '{name}' takes {taken}, and a policy here gives a Discrete or a Box of floats")

    def flatten(self, shown: Any) -> np.ndarray:
        """[O] float32"""
        from gymnasium import spaces

        if type(self.observation_space) is spaces.Box:
            return np.array(shown, np.float32).reshape(-1)
        return np.asarray(spaces.flatten(self.observation_space, shown), np.float32)

    def action(self, drawn: np.ndarray) -> Any:
        """What the policy drew, as the world takes it: cut at its bounds."""
        if self.discrete:
            return self.first + int(drawn[0])
        return np.clip(drawn, self.low, self.high).reshape(self.shape)


def open_world(name: str, args: dict[str, Any]) -> tuple[Any, WorldSpaces]:
    """A world, and what it shows and takes."""
    try:
        world = world_factory(name)(**args)
    except ConfigError:
        raise
    except Exception as error:  # a world raises whatever it likes
        raise ConfigError(f"the world '{name}' cannot be made: {type(error).__name__}: {error}") from error
    return world, WorldSpaces.of(name, world)


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
        columns: tuple[list[int], list[float], list[int]] = ([], [], [])  # tokens, logprobs, versions
        ended, last = "", spaces.flatten(shown)
        while not ended:
            request = Request([GIVEN], sampling, key=chat.key(len(rows)), policy=t.policy, observation=last)
            done = await chat.generate(request)
            if done.steps is None:
                raise DataError(
                    'task.env = "control" with a model that writes text: set model.path to a policy of actions'
                )
            for column, own in zip(columns, (done.tokens, done.logprobs, done.versions), strict=True):
                column.append(own[0])
            rows.append(done.steps.rows[0])
            shown, reward, terminated, truncated, _ = _call(name, world.step, spaces.action(done.steps.drawn[0]))
            rewards.append(float(reward))
            last = spaces.flatten(shown)
            ended = "ended" if terminated else "cut off" if truncated or len(rows) >= self.turns else ""
        steps = ContinuousSteps(np.stack(rows), spaces.observed, last if ended == "cut off" else None)
        t.extend([GIVEN])
        t.extend(columns[0], logprobs=columns[1], versions=columns[2], steps=steps)
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
