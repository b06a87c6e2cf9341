"""Worlds with Gymnasium's two verbs, by name, and the spaces of those that show and take arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rondel.core.errors import ConfigError, EnvError
from rondel.core.registry import import_attribute
from rondel.generate.envs.external_envs import OpenEnv, TextArena


def world_factory(name: str) -> Callable[..., Any]:
    """ "openenv:http://...", "textarena:Game-v0", or "module:name", a function or class of
    yours; anything else is an id of gymnasium.
    """
    kind, _, rest = name.partition(":")
    if kind in OTHERS:
        return partial(OTHERS[kind], rest)
    if ":" in name and not re.search(r"-v\d+$", name):
        if not callable(made := import_attribute("world", name)):
            raise ConfigError(f"the world '{name}' is {made!r:.60}, and no function or class")
        return made
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"the world '{name}' is an id of gymnasium, which is not installed: pip install gymnasium"
        ) from error
    return lambda **args: gymnasium.make(name, **args)


OTHERS: dict[str, Callable[..., Any]] = {"openenv": OpenEnv, "textarena": TextArena}


Taken = tuple[np.ndarray, list[float], str]  # what it shows [O], what each action was paid, how the episode stands


@dataclass(frozen=True, slots=True)
class WorldSource:
    """What opens a world anywhere. `pixels`: of a side of what it shows, at most; None: its observation."""

    name: str
    args: dict[str, Any]
    pixels: int | None = None


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
        if not isinstance(seen, spaces.Space) or isinstance(seen, spaces.Text) or not seen.is_np_flattenable:
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

    def observe(self, shown: Any) -> np.ndarray:
        """`flatten` for a policy that reads numbers. EnvError where one is not finite: the policy would answer with nan,
        and its weights would be blamed."""
        flat = self.flatten(shown)
        if len(odd := np.flatnonzero(~np.isfinite(flat))):
            raise EnvError(
                f"a world showed {flat[odd[0]]} as number {odd[0]} of its observation, and a policy reads finite "
                "numbers: mend the world, or wrap it in a function of yours that replaces them"
            )
        return flat

    def action(self, drawn: np.ndarray) -> Any:
        """What the policy drew, as the world takes it: cut at its bounds."""
        if self.discrete:
            return self.first + int(drawn[0])
        return np.clip(drawn, self.low, self.high).reshape(self.shape)

    @property
    def taken_size(self) -> int:
        """How many numbers `taken` has."""
        return 1 if self.discrete else self.actions

    def taken(self, drawn: np.ndarray) -> np.ndarray:
        """What the world takes of it, [1 or A] float32: the number of the action, counted from 0,
        or numbers in bounds."""
        return drawn if self.discrete else np.clip(drawn, self.low, self.high)


def open_world(name: str, args: dict[str, Any]) -> tuple[Any, WorldSpaces]:
    """A world, and what it shows and takes."""
    try:
        world = world_factory(name)(**args)
    except ConfigError:
        raise
    except Exception as error:  # a world raises whatever it likes
        raise ConfigError(f"the world '{name}' cannot be made: {type(error).__name__}: {error}") from error
    return world, WorldSpaces.of(name, world)


def call_world(name: str, verb: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A verb of a world; EnvError where it raises."""
    try:
        return verb(*given, **named)
    except Exception as error:  # a world raises whatever it likes
        what = getattr(verb, "__name__", "a verb")
        raise EnvError(f"{what} of the world '{name}' raised {type(error).__name__}: {error}") from error
