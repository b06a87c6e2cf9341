"""The engine of a flow: one device and one module, which it may share with the trainer.

A request is a prompt, a key and a number of steps K; its completion is K points with the log-density of each. Noise is
counter-based (`draw_normal`), and a row of a pass has the same bits whoever is beside it.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from rondel.core.errors import EngineError
from rondel.core.types import Completion, Request
from rondel.generate.engine.flow.chain import Chain
from rondel.generate.engine.stepwise.answer import refuse_overlong
from rondel.generate.engine.stepwise.continuous_engine import ContinuousEngine
from rondel.models.flow.transition import log_density, step_mean
from rondel.models.packed_steps import PackedSteps


class FlowEngine(ContinuousEngine[Chain]):
    """Draws chains of denoising steps (chain.py)."""

    def open_answer(self, request: Request, done: asyncio.Future[Completion]) -> Chain:
        refuse_overlong(request, self.context_limit)
        return Chain.of(request, done, self.head.dim)

    @torch.no_grad()
    def draw_step(self, answers: list[Chain]) -> list[tuple[np.ndarray, float]]:
        """The next point of each, [D], and its log-density; 0 where nothing is random."""
        dim, device = self.head.dim, self.loaded.device
        rows = [np.concatenate([c.point, c.noise(), c.numbers[c.step]])[None] for c in answers]
        steps = PackedSteps.of(rows, [c.prompt for c in answers], device)
        x, noise, numbers = steps.rows[:, :dim], steps.rows[:, dim : 2 * dim], steps.rows[:, 2 * dim :]
        mean = step_mean(x, self.head.velocity(x, numbers[:, 0], steps), numbers[:, 1:])
        drawn, std = mean + numbers[:, 3:] * noise, numbers[:, 3]
        if not bool(drawn.isfinite().all()):
            raise EngineError("a point is not finite: the model's weights have overflowed")
        density = torch.where(std > 0, log_density(drawn, mean, std.clamp_min(1e-30)), torch.zeros_like(std))
        return list(zip(drawn.cpu().numpy(), density.tolist(), strict=True))
