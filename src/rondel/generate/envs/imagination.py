"""Episodes in a learned model of the world: short ones, that begin where the policy has been.

the episode that was played ──its transitions──> the model's engine: their densities, and how far it is off
      │ some of its observations                          │ not too far off?
      └──> action of the policy ──> transition of the model ──> action ──> ... horizon          world.imagined

The error is that of weights that were never trained on this episode: it is held out until the step that trains on it.
Branches as in MBPO (arXiv:1906.08253), with a member of the ensemble drawn for every step.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import DataError
from rondel.core.transitions import IMAGINED, OBSERVED, PREDICTED, split_drawn, transition_rows, transitions
from rondel.core.types import POLICY, Completion, Request, Score, Trajectory
from rondel.generate.envs.stepped_episode import GIVEN, SteppedEpisode
from rondel.generate.envs.worlds import WorldSpaces

AGENTS = ("", IMAGINED, OBSERVED, PREDICTED)


@dataclass(frozen=True, slots=True)
class Imagination:
    """`Imagination(branches=16, horizon=8)`.

    policy    of the run, which is the model
    branches  imagined episodes beside one that is played
    horizon   most steps of one
    memory    transitions of earlier steps from which the model learns again (driver/transition_memory.py)
    trust     nothing is imagined where the error after `horizon` steps, on the episode just played, is above this; 1 is
              as good as to know the mean change
    """

    policy: str = "world"
    branches: int = 16
    horizon: int = 8
    memory: int = 4000
    trust: float = 0.5

    async def imagine(self, played: SteppedEpisode, chat: Any, spaces: WorldSpaces) -> list[Trajectory]:
        """The transitions that were observed, and episodes imagined from there; nothing beside one that is measured."""
        if chat.episode.is_measured:
            return []
        observed, error = await self._observe(played, chat, spaces)
        if not error <= self.trust:  # nan is not
            return [observed]
        random = np.random.Generator(np.random.Philox(key=chat.key(len(played)) % (1 << 128)))
        begins = played.x[random.integers(len(played), size=self.branches)]
        made = await asyncio.gather(*(self._branch(x, chat.beside(IMAGINED), spaces) for x in begins))
        return [observed, *(trajectory for pair in made for trajectory in pair)]

    async def _observe(self, played: SteppedEpisode, chat: Any, spaces: WorldSpaces) -> tuple[Trajectory, float]:
        """-> what the world did, with the model's density of each step, and the error after the last predicted step
        that the episode is long enough for."""
        after = np.concatenate([played.x[1:], np.asarray(played.last)[None]])
        ends = np.zeros(len(played))
        ends[-1] = played.ended == "ended"
        taken = np.stack([spaces.taken(drawn) for drawn in played.drawn])
        steps = transitions(transition_rows(played.x, taken, after, np.array(played.rewards), ends), spaces.observed)
        sampling = replace(chat.sampling, max_tokens=self.horizon, min_tokens=0)
        key = chat.key(len(played) + 1)  # behind those of its steps and of `imagine`; nothing is drawn with it
        done: Completion = await chat.generate(Request([GIVEN], sampling, key=key, policy=self.policy, steps=steps))
        if not done.measured:
            raise DataError(
                f'policies.{self.policy} is no model of a world: set its model to {{ random = "mlp_world" }}'
            )
        t = Trajectory(policy=self.policy, agent=OBSERVED)
        t.extend([GIVEN])
        t.extend(done.tokens, logprobs=done.logprobs, versions=done.versions, steps=done.steps)
        mean = math.fsum(done.logprobs) / len(played)
        known = {name: value for name, value in done.measured.items() if math.isfinite(value)}
        t.score = Score(mean, {"log_density": mean} | _first_and_last(known, self.horizon))
        t.text = f"{len(played)} transitions"
        return t, next((known[name] for j in range(self.horizon, 0, -1) if (name := f"error_{j}") in known), math.nan)

    async def _branch(self, x: np.ndarray, chat: Any, spaces: WorldSpaces) -> list[Trajectory]:
        """-> the policy's episode, and the model's, whose score is the log-density of what it drew."""
        sampling = replace(chat.sampling, max_tokens=1, min_tokens=0)
        imagined = SteppedEpisode(chat.trajectory, spaces.observed)
        predicted = SteppedEpisode(Trajectory(policy=self.policy, agent=PREDICTED), spaces.observed + spaces.taken_size)
        while not imagined.ended:
            key = chat.key(2 * len(imagined))
            action = await chat.generate(Request([GIVEN], sampling, key=key, policy=POLICY, observation=x))
            given = np.concatenate([x, spaces.taken(_drawn(action))]).astype(np.float32)
            key = chat.key(2 * len(imagined) + 1)
            follows = await chat.generate(Request([GIVEN], sampling, key=key, policy=self.policy, observation=given))
            change, reward, ends = split_drawn(_drawn(follows))
            x = x + change
            ended = "ended" if ends else "cut off" if len(imagined) + 1 >= self.horizon else ""
            imagined.add(action, reward, x, ended)
            predicted.add(follows, follows.logprobs[0], given, "ended" if ended else "")
        return [imagined.finish(), predicted.finish()]


def _drawn(done: Completion) -> np.ndarray:
    assert isinstance(done.steps, ContinuousSteps)
    return done.steps.drawn[0]


def _first_and_last(known: dict[str, float], horizon: int) -> dict[str, float]:
    """Of the errors after each predicted step the first and the last."""
    wanted = {"error_1": "error_1", f"error_{horizon}": "error_h"} if horizon > 1 else {"error_1": "error_1"}
    others = {name: value for name, value in known.items() if not name.startswith("error_")}
    return others | {told: known[name] for name, told in wanted.items() if name in known}
