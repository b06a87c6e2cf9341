"""A world of arrays where it steps: on the event loop, on a thread, or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rondel.generate.envs.frame_worlds import open_frame_world
from rondel.generate.envs.worlds import Taken, WorldSource, WorldSpaces, call_world, open_world


def open_hosted(source: WorldSource) -> HostedWorld:
    made = open_world if source.pixels is None else partial(open_frame_world, pixels=source.pixels)
    return HostedWorld(source.name, *made(source.name, source.args))


@dataclass(frozen=True, slots=True)
class HostedWorld:
    """`world` and what it shows and takes. Its verbs raise EnvError where those of the world raise."""

    name: str
    world: Any
    spaces: WorldSpaces

    is_lost = False

    def reset(self, seed: int) -> np.ndarray:
        """-> [O] what it shows first"""
        shown, _ = call_world(self.name, self.world.reset, seed=seed)
        return self.spaces.observe(shown)

    def take(self, actions: np.ndarray, left: int) -> Taken:
        """[H, n]: one behind the other, at most `left` of them."""
        step = partial(call_world, self.name, self.world.step)
        shown, rewards, ended = take_actions(step, map(self.spaces.action, actions), left)
        return self.spaces.observe(shown), rewards, ended

    def close(self) -> None:
        """What it raises then is nobody's concern."""
        with suppress(Exception):
            self.world.close()


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
