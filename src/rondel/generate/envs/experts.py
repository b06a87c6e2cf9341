"""Scripted controllers of worlds, whose episodes a policy of action tokens copies before it is paid: behaviour cloning.

expert(observation [O] float32) -> the number of an action counted from 0, or the numbers [A] of one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rondel.core.types import Task
from rondel.generate.envs.gym import Gym
from rondel.generate.envs.token_worlds import TokenWorlds

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
