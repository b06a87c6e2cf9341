"""A policy that draws points: one prompt, one chain of denoising steps.
Its demonstrations are steps of flow matching."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.errors import DataError
from rondel.core.types import FLAGS, IDS, NUMBERS, Task, TokenColumn, Trajectory
from rondel.generate.envs.points import find_points
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.template import Messages, Schemas


class Flow:
    """Gives the prompt, takes one point.

    points  data points of one demonstration, each at a noise level of its own
    every   one denoising step of so many is trained, counted back from the last one, whose point is the answer
    shared_noise  all chains of a group begin with the same noise, in training (arXiv:2505.07818, DanceGRPO)
    """

    def __init__(
        self, *, points: int = 32, every: int = 1, shared_noise: bool = False, system: str | None = None
    ) -> None:
        self.points, self.every, self.shared_noise, self.system = points, every, shared_noise, system

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        return opening_messages(task, system=self.system), ()

    async def run(self, task: Task, chat: Any) -> Trajectory:
        chat.give(*self.prompt(task))
        if self.shared_noise:
            chat.start_key = chat.group_key
        done = await chat.reply()
        if done.steps is None:
            raise DataError('task.env = "flow" with a model that writes tokens: set model.path to a flow')
        trajectory: Trajectory = chat.trajectory
        return trajectory if self.every == 1 else _thinned(trajectory, self.every)

    def demonstrate(self, task: Task, chat: Any, key: int) -> Trajectory:
        """Data points of the task, chosen and noised by `key` alone, as the policy's own steps: their log-density is
        -½·mean (v - (noise - x0))² and a constant, so the row sft on them is flow matching (arXiv:2210.02747).
        """
        if not isinstance(known := task.data.get("points"), dict):
            raise DataError(f"task {task.id} names no points to learn from: task.data.kind = 'points' brings them")
        chat.give(*self.prompt(task))
        data = _points_of(known["name"], repr(known["args"]))[task.data["prompt"]]
        chat.write("", steps=matching_steps(data, self.points, key))
        trajectory: Trajectory = chat.trajectory
        return trajectory


def _thinned(t: Trajectory, every: int) -> Trajectory:
    """The same with every n-th of its steps. A step is a Gaussian of its own, so none needs the others."""
    assert t.steps is not None
    first, n = len(t.tokens) - len(t.steps), len(t.steps)
    kept = [*range(first), *range(first + (n - 1) % every, first + n, every)]
    *read, said = t.conversation
    return replace(
        t,
        tokens=TokenColumn(IDS, [t.tokens[at] for at in kept]),
        mask=TokenColumn(FLAGS, [t.mask[at] for at in kept]),
        logprobs=TokenColumn(NUMBERS, [t.logprobs[at] for at in kept]),
        versions=TokenColumn(IDS, [t.versions[at] for at in kept]),
        steps=ContinuousSteps(t.steps.rows[(n - 1) % every :: every]),
        conversation=[*read, said._replace(end=len(kept))],
    )


@lru_cache(4)
def _points_of(name: str, args: str) -> dict[str, np.ndarray]:
    from ast import literal_eval

    return find_points(name, literal_eval(args))


def matching_steps(data: np.ndarray, n: int, key: int) -> ContinuousSteps:
    """n steps of flow matching on data points [N, D]: x = (1 - sigma)·x0 + sigma·noise, and what leads there, noise -
    x0. sigma is uniform in [0, 1).
    """
    random = np.random.Generator(np.random.Philox(key=key % (1 << 128)))
    x0 = data[random.integers(len(data), size=n)]
    sigma, noise = random.random(n), random.standard_normal(x0.shape)
    x = (1 - sigma[:, None]) * x0 + sigma[:, None] * noise
    return ContinuousSteps.of(x, noise - x0, sigma=sigma, scale_x=0.0, scale_v=1.0, std=1.0)
