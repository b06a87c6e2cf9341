"""The engine of a learned model of a world: a request is an observation and an action, its completion what follows.

A request that brings the transitions of an episode is scored: nothing is drawn then.
"""

from __future__ import annotations

import asyncio

import numpy as np

from rondel.core.errors import EngineError
from rondel.core.types import Completion, Request
from rondel.generate.engine.builtin.sampler import draw_uniform
from rondel.generate.engine.control.action_request import ActionRequest
from rondel.generate.engine.control.recorded_transitions import RecordedTransitions
from rondel.generate.engine.stepwise.continuous_engine import ContinuousEngine
from rondel.models.control.world_head import error_names
from rondel.models.noise import draw_normal


class WorldEngine(ContinuousEngine[ActionRequest | RecordedTransitions]):
    """Draws transitions."""

    def open_answer(self, request: Request, done: asyncio.Future[Completion]) -> ActionRequest | RecordedTransitions:
        if request.steps is None:
            return ActionRequest.of(request, done, self.head.observed, self.head.dim)
        names = error_names(request.sampling.max_tokens)
        return RecordedTransitions.of(request, done, self.head.observed, self.head.dim, names)

    def draw_step(self, answers: list[ActionRequest | RecordedTransitions]) -> list[tuple[np.ndarray, float]]:
        """What follows each action, [O + 3], and its log-density; of recorded transitions all that is told of them."""
        asked = [own for own in answers if isinstance(own, ActionRequest)]
        drawn = iter(self._draw(asked) if asked else [])
        return [next(drawn) if isinstance(own, ActionRequest) else (self._fit(own), 0.0) for own in answers]

    def _draw(self, asked: list[ActionRequest]) -> list[tuple[np.ndarray, float]]:
        keys = [own.request.key for own in asked]
        uniform = np.array([[draw_uniform(key, t) for t in range(2)] for key in keys])
        normal = np.stack([draw_normal(key, 0, self.head.size + 1) for key in keys])
        drawn, density = self.head.draw(np.stack([own.observation for own in asked]), uniform, normal)
        if not (np.isfinite(density).all() and np.isfinite(drawn).all()):
            raise EngineError("what follows an action is not finite: the model of the world has overflowed")
        return list(zip(drawn, density.tolist(), strict=True))

    def _fit(self, own: RecordedTransitions) -> np.ndarray:
        fit = self.head.fit(own.given.rows, own.request.sampling.max_tokens)
        return np.concatenate([fit.log_density, fit.errors])
