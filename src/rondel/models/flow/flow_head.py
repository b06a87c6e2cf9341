"""What turns the velocities of a flow into log-densities of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rondel.core.continuous_steps import SCALARS
from rondel.core.errors import ConfigError
from rondel.models.collectives import RankGroup
from rondel.models.flow.block_cuts import cut_blocks
from rondel.models.flow.patch_transformer import PatchTransformer
from rondel.models.flow.token_share import TokenShare
from rondel.models.flow.transition import (
    density_of,
    entropy,
    gaussian_kl,
    log_density,
    step_coefficients,
    step_mean,
)
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps
from rondel.models.step_head import StepHead
from rondel.models.tensor_cuts import TensorCuts

PROBE_KEY = 20261126  # of the noise in which both sides of a weight update score a prompt


class FlowHead(StepHead):
    """Stands where a model of text has its LMHead, over a module whose `forward` gives velocities. The policy over
    chains of points is the Gaussian of each step.
    """

    kind = "flow"

    def shared_by(self, ranks: RankGroup | None) -> FlowHead:
        if ranks is None or not isinstance(self.model, PatchTransformer):
            return super().shared_by(ranks)
        if (tokens := self.model.token_count) < ranks.size:
            raise ConfigError(f"place.mesh has cp = {ranks.size}, and a sample has {tokens} tokens: set cp to {tokens}")
        return FlowHead(self.model, ranks)

    def cut_over(self, ranks: RankGroup, *, sequence: bool) -> TensorCuts:
        if not isinstance(self.model, PatchTransformer):
            return super().cut_over(ranks, sequence=sequence)
        return cut_blocks(self.model, ranks, sequence=sequence)

    def describe(self, max_tokens: int, temperature: float) -> str:
        return f"flow: {self.dim} numbers a point, {max_tokens} steps with noise {temperature:g}"

    @property
    def weight(self) -> Tensor:
        """Where the weights lie, and in what."""
        found: Tensor = self.model.leave.weight
        return found

    @property
    def step_tokens(self) -> int:
        return self.model.token_count if isinstance(self.model, PatchTransformer) else 1

    @property
    def dim(self) -> int:
        """D of its points."""
        return int(self.model.config.dim)

    @property
    def point_size(self) -> int:
        return self.dim

    def velocity(self, x: Tensor, sigma: Tensor, steps: PackedSteps) -> Tensor:
        """[M, D], [M] -> [M, D], under the prompts of these steps."""
        found: Tensor = self.model.forward(x, sigma, self._conditions(steps))
        return found

    def _conditions(self, steps: PackedSteps) -> Tensor:
        """[M, W] of the prompt of each step."""
        condition: Tensor = self.model.condition(steps.prompt, steps.begins)
        return condition.index_select(0, steps.prompt_of)

    def evaluate_steps(self, steps: PackedSteps, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(log-density [M], entropy [M]) of recorded steps under the weights of now, a dimension; in the dtype of the
        rows, which is at least float32. Their noise is recorded with them, so no temperature is read.
        """
        std = steps.rows[:, -1]
        if self.ranks is not None:
            self._check_width(steps)
            return self._shared_density(steps, TokenShare.of(self.model.token_count, self.ranks)), entropy(std)
        return log_density(self._drawn(steps), self.step_means(steps), std), entropy(std)

    def step_means(self, steps: PackedSteps) -> Tensor:
        """[M, D] of the Gaussian of each step."""
        self._check_width(steps)
        x, numbers = steps.rows[:, : self.dim], steps.rows[:, 2 * self.dim :]
        velocity = self.velocity(x, numbers[:, 0], steps).to(steps.rows.dtype)
        return step_mean(x, velocity, numbers[:, 1:])

    def evaluate_with_reference(self, steps: PackedSteps, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same as `evaluate_steps`, and KL(policy || reference) of each step [M], by the means of the reference
        [M, D].
        """
        own, std = self.step_means(steps), steps.rows[:, -1]
        return log_density(self._drawn(steps), own, std), entropy(std), gaussian_kl(own, means.view_as(own), std)

    def _drawn(self, steps: PackedSteps) -> Tensor:
        return steps.rows[:, self.dim : 2 * self.dim]

    def _check_width(self, steps: PackedSteps) -> None:
        if (width := steps.rows.shape[1]) != 2 * self.dim + SCALARS:
            raise ValueError(f"steps of {(width - SCALARS) / 2:g} dimensions for a flow of {self.dim}")

    def _shared_density(self, steps: PackedSteps, share: TokenShare) -> Tensor:
        """[M] on every rank, of which each computes its tokens' part of the mean over the dimensions."""
        dim, rows = self.dim, steps.rows
        numbers, std = rows[:, 2 * dim :], rows[:, -1]
        x, drawn = (share.own(self.model.cut_patches(points)) for points in rows[:, : 2 * dim].split(dim, 1))
        velocity = self.model.patch_velocities(x, numbers[:, 0], self._conditions(steps), share).to(rows.dtype)
        mean = step_mean(x.flatten(1), velocity.flatten(1), numbers[:, 1:])
        z = (drawn.flatten(1) - mean) / std[:, None]
        return density_of(share.sum((z * z).sum(-1)) / dim, std)

    @torch.no_grad()
    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        """What both sides of a weight update must agree on: log-densities of a fixed chain under this prompt, one for
        each token but the first, whose entry is 0. The points are noise, near to where a flow takes them.
        """
        n = len(tokens) - 1
        if n < 1:
            return [0.0] * len(tokens)
        numbers = step_coefficients(n, 1.0)
        points = np.stack([draw_normal(PROBE_KEY, t, 2 * self.dim) for t in range(n)])
        points[:, self.dim :] = numbers[:, 1:2] * points[:, : self.dim] + numbers[:, 3:] * points[:, self.dim :]
        rows = np.concatenate([points, numbers], 1).astype(np.float32)
        return [0.0, *self.evaluate_steps(PackedSteps.of([rows], [tokens], self.weight.device))[0].tolist()]
