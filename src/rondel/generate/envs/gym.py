"""Worlds with Gymnasium's two verbs, played in text: what the world shows is given,
what the policy writes is the action.

reset(seed) -> text       give ──> reply ──> step(text) -> text, reward, terminated, truncated
                            ^────────────────────┘           each reward is earned at the last token of its turn

Verbs run on threads, so a slow world delays nobody else's episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rondel.core.errors import EnvError
from rondel.core.protocols import Chat, Messages
from rondel.core.types import Score, Task, Trajectory
from rondel.generate.envs.tools import on_a_thread
from rondel.generate.envs.worlds import world_factory


class Gym:
    """`Gym(turns=10)`; which world and which seed is the task's.

    turns    most actions of an episode, which is then over
    open     from the name of a world to what makes it; what it shows is text, or parts of a message
    timeout  seconds for one verb of the world
    """

    scores_itself = True

    def __init__(
        self,
        *,
        turns: int = 8,
        timeout: float = 30.0,
        suffix: str = "",
        system: str | None = None,
        open: Callable[[str], Callable[..., Any]] = world_factory,
    ) -> None:
        self.turns, self.timeout, self.suffix, self.system, self.open = turns, timeout, suffix, system, open

    async def run(self, task: Task, chat: Chat) -> Trajectory:
        name, trajectory = task.data["world"], chat.trajectory
        world = await self._call_environment(name, self.open(name), **dict(task.data.get("args") or {}))
        earned: list[tuple[int, float]] = []
        try:
            seen, _ = await self._call_environment(name, world.reset, seed=task.data["seed"])
            for left in reversed(range(self.turns)):
                said: Messages = [] if earned or self.system is None else [{"role": "system", "content": self.system}]
                chat.give([*said, {"role": "user", "content": self._content(seen)}])
                done = await chat.reply()
                if not done.tokens:  # no room for an action
                    break
                seen, reward, terminated, truncated, _ = await self._call_environment(name, world.step, done.text)
                earned.append((len(trajectory.tokens) - 1, float(reward)))
                if terminated or truncated:
                    break
                if not left:
                    trajectory.finish_reason = "length"
        finally:
            if hasattr(world, "close"):
                await self._call_environment(name, world.close)
        whole = not getattr(chat, "closed", ())  # else its turns lie in several trajectories
        trajectory.score = Score(sum(value for _, value in earned), steps=tuple(earned) if whole else ())
        return trajectory

    def _content(self, seen: Any) -> Any:
        if not isinstance(seen, list):
            return f"{seen}{self.suffix}"
        return [*seen, {"type": "text", "text": self.suffix}] if self.suffix else seen

    async def _call_environment(self, name: str, verb: Callable[..., Any], *given: Any, **named: Any) -> Any:
        def call() -> Any:
            return verb(*given, **named)

        call.__name__ = what = getattr(verb, "__name__", "make")
        try:
            async with asyncio.timeout(self.timeout):
                return await on_a_thread(call, {})
        except TimeoutError as error:
            raise EnvError(
                f"{what} of the world '{name}' did not end within {self.timeout:g} s (task.env.timeout)"
            ) from error
        except Exception as error:  # a world raises whatever it likes
            raise EnvError(f"{what} of the world '{name}' raised {type(error).__name__}: {error}") from error
