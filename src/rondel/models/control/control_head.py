"""What turns the states of a policy of actions into distributions of its actions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rondel.models.control.distribution import categorical, gaussian
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps
from rondel.models.step_head import StepHead

PROBE_KEY = 20261127  # of the observations in which both sides of a weight update score a prompt


class ControlHead(StepHead):
    """Over a module whose `forward` gives states [M, W] and whose `act` gives logits or means [M, A].

    rows of a step  observation [O], then the action: its number, or its A numbers
    """

    kind = "control"

    def describe(self, max_tokens: int, temperature: float) -> str:
        config = self.model.config
        what = f"one of {config.action_size} actions" if config.discrete else f"actions of {config.action_size} numbers"
        return f"control: {config.observation_size} numbers of an observation, {what}"

    @property
    def weight(self) -> Tensor:
        """Where the weights lie, and in what."""
        found: Tensor = self.model.get_output_embeddings().weight
        return found

    @property
    def observed(self) -> int:
        """O"""
        return int(self.model.config.observation_size)

    @property
    def dim(self) -> int:
        """How many numbers stand for an action."""
        return 1 if self.model.config.discrete else int(self.model.config.action_size)

    @property
    def chunk(self) -> tuple[int, int]:
        """(H, n): the last H·n numbers of a step are H actions of n numbers,
        which the world takes behind each other."""
        return 1, self.dim

    def states(self, steps: PackedSteps) -> Tensor:
        found: Tensor = self.model(steps.rows[:, : self.observed])
        return found

    def evaluate_steps(self, steps: PackedSteps, *, temperature: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """In the dtype of the module. The density of an action of several numbers is that of all together."""
        width = self.observed + self.dim
        if steps.rows.shape[1] != width:
            raise ValueError(f"steps of {steps.rows.shape[1]} numbers for a policy whose steps have {width}")
        out = self.model.act(self.states(steps))
        drawn = steps.rows[:, self.observed :]
        if self.model.config.discrete:
            return categorical(out, drawn[:, 0].long(), temperature)
        return gaussian(out, self.model.log_std, drawn, temperature)

    @torch.no_grad()
    def draw(self, seen: PackedSteps, temperature: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions [n, 1 or A] and their log-densities [n]; at temperature 0 the likeliest, with its density at 1.

        seen   steps of observations alone [n, O]
        noise  [n] uniform numbers in [0, 1), or [n, A] of a standard normal
        """
        device = self.weight.device
        out = self.model.act(self.states(seen))
        greedy = temperature == 0
        heat = torch.from_numpy(np.where(greedy, np.float32(1), temperature).astype(np.float32)).to(device)
        if self.model.config.discrete:
            cumulated = torch.softmax((out / heat[:, None]).double(), -1).cumsum(-1).cpu().numpy()
            number = (cumulated < noise[:, None] * cumulated[:, -1:]).sum(-1)
            number = np.where(greedy, out.argmax(-1).cpu().numpy(), number)
            density, _ = categorical(out, torch.from_numpy(number).to(device), heat)
            return number[:, None].astype(np.float32), density.cpu().numpy()
        std = (self.model.log_std.exp() * heat[:, None]).cpu().numpy()
        action = out.cpu().numpy() + np.where(greedy[:, None], np.float32(0), std * noise)
        density, _ = gaussian(out, self.model.log_std, torch.from_numpy(action).to(device), heat)
        return action, density.cpu().numpy()

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        """Log-densities of fixed actions under fixed observations, as many as tokens follow the first."""
        if len(tokens) < 2:
            return [0.0] * len(tokens)
        rows = self.probe_rows(PROBE_KEY, len(tokens) - 1)
        with torch.no_grad():
            return [0.0, *self.evaluate_steps(PackedSteps.of([rows], [tokens], self.weight.device))[0].tolist()]

    def probe_rows(self, key: int, n: int) -> np.ndarray:
        """[n, O + numbers of an action]: fixed observations, and actions under them."""
        rows, config = np.stack([draw_normal(key, t, self.observed + self.dim) for t in range(n)]), self.model.config
        if config.discrete:
            rows[:, -1] = np.arange(n) % config.action_size
        return rows
