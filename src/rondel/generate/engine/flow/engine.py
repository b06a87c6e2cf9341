"""The engine of a flow.

A request is a prompt, a key and a number of steps K; its completion is K points with the log-density of each.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from rondel.core.errors import EngineError, UserError
from rondel.core.types import Completion, Request
from rondel.generate.engine.flow.chain import Chain
from rondel.generate.engine.step_engine import StepEngine
from rondel.models.flow.packed_steps import PackedSteps
from rondel.models.flow.transition import log_density, step_mean


class FlowEngine(StepEngine):
    """Draws chains of denoising steps (chain.py)."""

    def open_request(self, request: Request, done: asyncio.Future[Completion]) -> Chain:
        if len(request.tokens) + request.sampling.max_tokens > self.loaded.max_context:
            raise UserError(
                f"{len(request.tokens)} tokens and {request.sampling.max_tokens} steps do not fit into a context of "
                f"{self.loaded.max_context}; set max_position_embeddings of the model"
            )
        return Chain.of(request, done, self.head.dim)

    @torch.no_grad()
    def draw_steps(self, chains: list[Chain]) -> tuple[np.ndarray, list[float]]:
        """On the device's thread: the next point of each, [n, D], and its log-density; 0 where nothing is random."""
        dim, device = self.head.dim, self.loaded.device
        rows = [np.concatenate([c.point, c.noise(), c.numbers[c.step]])[None] for c in chains]
        steps = PackedSteps.of(rows, [c.prompt for c in chains], device)
        x, noise, numbers = steps.rows[:, :dim], steps.rows[:, dim : 2 * dim], steps.rows[:, 2 * dim :]
        mean = step_mean(x, self.head.velocity(x, numbers[:, 0], steps), numbers[:, 1:])
        drawn, std = mean + numbers[:, 3:] * noise, numbers[:, 3]
        if not bool(drawn.isfinite().all()):
            raise EngineError("a point is not finite: the model's weights have overflowed")
        density = torch.where(std > 0, log_density(drawn, mean, std.clamp_min(1e-30)), torch.zeros_like(std))
        return drawn.cpu().numpy(), density.tolist()
