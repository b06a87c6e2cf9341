"""The engine of actions: a request is an observation and a key, its completion one action with its log-density, or one
chunk of actions.

The observations of all worlds that wait are one pass of the model.
"""

from __future__ import annotations

import asyncio

import numpy as np

from rondel.core.errors import EngineError
from rondel.core.types import Completion, Request
from rondel.generate.engine.builtin.sampler import draw_uniform
from rondel.generate.engine.control.action_request import ActionRequest
from rondel.generate.engine.stepwise.continuous_engine import ContinuousEngine
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps


class ControlEngine(ContinuousEngine[ActionRequest]):
    """Draws actions."""

    def open_answer(self, request: Request, done: asyncio.Future[Completion]) -> ActionRequest:
        return ActionRequest.of(request, done, self.head.observed, self.head.dim, self.head.chunk)

    def draw_step(self, answers: list[ActionRequest]) -> list[tuple[np.ndarray, float]]:
        """The numbers of each action or chunk, and their log-density."""
        keys = [own.request.key for own in answers]
        if self.head.model.config.discrete:
            noise = np.array([draw_uniform(key, 0) for key in keys])
        else:
            noise = np.stack([draw_normal(key, 0, self.head.dim) for key in keys])
        temperature = np.array([own.request.sampling.temperature for own in answers], np.float32)
        seen = [own.observation[None] for own in answers]
        steps = PackedSteps.of(seen, [own.request.tokens for own in answers], self.loaded.device)
        drawn, density = self.head.draw(steps, temperature, noise)
        if not np.isfinite(density).all():
            raise EngineError("the density of an action is not finite: the model's weights have overflowed")
        return list(zip(drawn, density.tolist(), strict=True))
