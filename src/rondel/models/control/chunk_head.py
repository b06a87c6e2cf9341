"""What turns the velocities of a flow into distributions of chunks of actions.

M chunks · K denoising steps · H actions of A numbers · D = H·A

A chunk is drawn in K Gaussian steps, x_0 noise, x_K the chunk (models/flow/transition.py):

    log p(chunk | observation) = 1/K · sum_k sum_D log N(x_k; scale_x·x_(k-1) + scale_v·v_k, std_k²),
    v_k = v(x_(k-1), sigma_k | observation)

the joint density of its denoising steps, averaged over them and added up over the numbers of all its actions: the
`joint_logprob` and `chunk_level` of RLinf, arXiv:2510.25889 (pi_RL). That of x_0 no weight moves: it is left out.

Without noise, std_k = 0, a chain is not drawn at random, and one that a demonstration wrote is a straight line from
noise to its chunk. Its density is that of flow matching (arXiv:2210.02747), with the step's length |scale_v| in place
of std_k:

    log N(x_k; x_(k-1) + scale_v·v, scale_v²) = -½·(v - (noise - chunk))² and a constant
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rondel.models.control.control_head import ControlHead
from rondel.models.flow.transition import LOG_2PI, entropy, step_coefficients
from rondel.models.packed_steps import PackedSteps


class ChunkHead(ControlHead):
    """Over a `FlowPolicy`. A temperature is the noise eta of the steps; at 0 the flow is followed without noise.

    rows of a step  observation [O], then the chain [(K + 1)·D], whose last point is the chunk
    """

    def describe(self, max_tokens: int, temperature: float) -> str:
        config = self.model.config
        return (
            f"control: {config.observation_size} numbers of an observation, {config.denoising_steps} denoising steps "
            f"with noise {temperature:g} to a chunk of {config.chunk} actions of {config.action_size} numbers"
        )

    @property
    def point(self) -> int:
        """D"""
        return int(self.model.config.point_size)

    @property
    def dim(self) -> int:
        """(K + 1)·D: how many numbers stand for a chunk."""
        return (int(self.model.config.denoising_steps) + 1) * self.point

    @property
    def chunk(self) -> tuple[int, int]:
        return self.model.config.chunk, self.model.config.action_size

    def coefficients(self, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """sigma [K], scale_x, scale_v and std [M, K] of the steps with noise [M]."""
        steps = self.model.config.denoising_steps
        plain, noisy = (temperature.new_tensor(step_coefficients(steps, eta)) for eta in (0.0, 1.0))
        heat = temperature[:, None]
        scales = (plain[:, i] + heat * heat * (noisy[:, i] - plain[:, i]) for i in (1, 2))
        return (plain[:, 0], *scales, heat * noisy[:, 3])  # type: ignore[return-value]

    def evaluate_steps(self, steps: PackedSteps, *, temperature: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """In the dtype of the module. The entropy is that of the noise alone,
        averaged and added up as the density is."""
        rows = steps.rows
        if rows.shape[1] != self.observed + self.dim:
            raise ValueError(
                f"steps of {rows.shape[1]} numbers for a policy whose steps have {self.observed + self.dim}"
            )
        heat = temperature if isinstance(temperature, Tensor) else rows.new_full((len(rows),), temperature)
        sigma, scale_x, scale_v, std = self.coefficients(heat.to(rows.dtype))
        chain = rows[:, self.observed :].unflatten(1, (-1, self.point))
        x = chain[:, :-1]
        velocity = self.model.velocity(x, sigma, self.states(steps))
        mean = scale_x[..., None] * x + scale_v[..., None] * velocity
        std = torch.where(std > 0, std, scale_v.abs())
        return self._density(chain[:, 1:] - mean, std), self.point * entropy(std).mean(1)

    def _density(self, deviation: Tensor, std: Tensor) -> Tensor:
        """[M, K, D], [M, K] -> [M]"""
        z = deviation / std[..., None]
        each = -0.5 * (z * z).sum(-1) - self.point * (std.log() + 0.5 * LOG_2PI)
        return each.mean(1)

    @torch.no_grad()
    def draw(self, seen: PackedSteps, temperature: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chains [n, (K + 1)·D] and the log-densities of their chunks [n]; 0 where nothing is random.

        seen   steps of observations alone [n, O]
        noise  [n, (K + 1)·D] of a standard normal: where a chain begins, and of its steps
        """
        device = self.weight.device
        heat = torch.from_numpy(temperature).to(device)
        sigma, scale_x, scale_v, std = self.coefficients(heat)
        states = self.states(seen)
        each = torch.from_numpy(noise).to(device).unflatten(1, (-1, self.point))
        chain, means = [each[:, 0]], list[Tensor]()
        for k in range(len(sigma)):
            x = chain[-1]
            velocity = self.model.velocity(x[:, None], sigma[k : k + 1], states)[:, 0]
            means.append(scale_x[:, k : k + 1] * x + scale_v[:, k : k + 1] * velocity)
            chain.append(means[-1] + std[:, k : k + 1] * each[:, k + 1])
        points, random = torch.stack(chain, 1), heat > 0
        density = self._density(points[:, 1:] - torch.stack(means, 1), torch.where(random[:, None], std, 1.0))
        return points.flatten(1).cpu().numpy(), torch.where(random, density, 0.0).cpu().numpy()

    def probe_rows(self, key: int, n: int) -> np.ndarray:
        """Chains as a flow draws them that sees a chunk of 0 in every point."""
        rows = super().probe_rows(key, n)
        sigma, scale_x, scale_v, std = (c.numpy() for c in self.coefficients(torch.ones(1)))
        chain = rows[:, self.observed :].reshape(n, -1, self.point)
        for k in range(len(sigma)):
            kept = scale_x[0, k] + scale_v[0, k] / sigma[k]
            chain[:, k + 1] = kept * chain[:, k] + std[0, k] * chain[:, k + 1]
        return rows
