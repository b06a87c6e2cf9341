"""Scripted controllers of worlds, whose episodes a policy copies before it is paid: behaviour cloning.

expert(observation [O] float32) -> the number of an action counted from 0, or the numbers [A] of one
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import Completion, Task, Trajectory
from rondel.generate.envs.control import Control
from rondel.generate.envs.frame_worlds import FrameWorld
from rondel.generate.envs.gym import Gym
from rondel.generate.envs.hosted_world import HostedWorld, open_hosted, take_actions
from rondel.generate.envs.stepped_episode import SteppedEpisode
from rondel.generate.envs.token_worlds import TokenWorlds
from rondel.generate.envs.worlds import call_world

Expert = Callable[[np.ndarray], Any]


def balance_cartpole(observation: np.ndarray) -> int:
    """Push the cart to where the pole falls: 1 where theta + theta' / 5 + (x + 2·x') / 50 > 0 (CartPole-v1).

    The observation is [x, x', theta, theta'].
    """
    x, speed, angle, fall = observation.astype(float)
    return int(angle + 0.2 * fall + 0.02 * x + 0.04 * speed > 0)


EXPERTS: dict[str, Expert] = {"cartpole": balance_cartpole}


class DemonstratedGym(Gym):
    """Worlds of action tokens, and what a scripted controller would have written in them.

    The controller plays the world of the task from the task's seed; `GoldEpisode` then shows the same episode to the
    policy, observations and all. A world must show the same under the same seed and actions.
    """

    def __init__(self, expert: Expert, worlds: TokenWorlds, **settings: Any) -> None:
        super().__init__(open=worlds, **settings)
        self.expert, self.worlds = expert, worlds

    def gold(self, task: Task) -> list[str]:
        """The words of each turn, as many as an episode has."""
        world = self.worlds(task.data["world"])(**dict(task.data.get("args") or {}))
        said: list[str] = []
        try:
            shown, _ = world.world.reset(seed=task.data["seed"])
            while len(said) < self.turns:
                said.append(world.write(self.expert(world.spaces.flatten(shown))))
                shown, _, terminated, truncated, _ = world.world.step(world.spaces.action(world.read(said[-1])))
                if terminated or truncated:
                    break
        finally:
            world.close()
        return said


class DemonstratedControl(Control):
    """Worlds of arrays, and the chunks of actions that a scripted controller would have drawn in them, as steps of flow
    matching.

    chunk, denoising_steps  H and K of the policy
    """

    def __init__(self, expert: Expert, *, chunk: int, denoising_steps: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.expert, self.chunk, self.denoising_steps = expert, chunk, denoising_steps
        self.own: dict[str, HostedWorld] = {}  # those of the controller

    def demonstrate(self, task: Task, chat: Any, key: int) -> Trajectory:
        """The controller's episode. Where the world ends, or `turns` are used up, the rest of a chunk is what the
        controller would do next, which the world does not take."""
        source = self.source_of(task)
        name = f"{source.name} {source.args}"
        hosted = self.own.get(name) or self.own.setdefault(name, open_hosted(source))
        world, spaces = hosted.world, hosted.spaces
        self.instruct(chat)
        played = SteppedEpisode(chat.trajectory, spaces.observed)
        shown, _ = call_world(source.name, world.reset, seed=task.data["seed"])
        while not played.ended:
            seen, rewards, chunk, ended = spaces.observe(shown), list[float](), list[np.ndarray](), ""
            for _ in range(self.chunk):
                state = world.observation if isinstance(world, FrameWorld) else shown
                chunk.append(np.asarray(self.expert(np.asarray(state, np.float32)), np.float32).reshape(-1))
                if ended:
                    continue
                take, action = partial(call_world, source.name, world.step), spaces.action(chunk[-1])
                shown, more, ended = take_actions(take, [action], self.turns - played.taken - len(rewards))
                rewards += more
            row = np.concatenate([seen, matching_chain(np.concatenate(chunk), self.denoising_steps, key, len(played))])
            steps = ContinuousSteps(row[None].astype(np.float32), spaces.observed)
            done = Completion([0], [0.0], [0], "stop", text="", steps=steps)  # type: ignore[arg-type]
            played.add(done, math.fsum(rewards), spaces.observe(shown), ended, taken=len(rewards))
        return played.finish()


def matching_chain(chunk: np.ndarray, steps: int, key: int, t: int) -> np.ndarray:
    """[D], K -> [(K + 1)·D]: x_k = (1 - sigma_k)·chunk + sigma_k·noise at the noise levels of K denoising steps, from
    the noise of step t of `key` straight to the chunk."""
    generator = np.random.Generator(np.random.Philox(key=key % (1 << 128), counter=[0, 0, 0, t]))
    noise, sigma = generator.standard_normal(len(chunk)), np.linspace(1.0, 0.0, steps + 1)[:, None]
    return ((1 - sigma) * chunk + sigma * noise).reshape(-1)
