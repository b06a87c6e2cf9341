"""A flow as engine and trainer use it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.continuous_steps import SCALARS
from rondel.core.errors import UserError
from rondel.models.flow.transition import draw_normal, entropy, log_density, step_coefficients, step_mean
from rondel.models.loaded_model import LoadedModel

PROBE_KEY = 20261126  # of the noise in which both sides of a weight update score a prompt


@dataclass(slots=True)
class PackedSteps:
    """M steps of several chains, as a model reads them.

    rows        [M, 2·D + 4]  `ContinuousSteps.rows` behind each other
    prompt      [P]           tokens of n prompts behind each other
    begins      [n]           where each begins
    prompt_of   [M]           which of them a step has
    """

    rows: Tensor
    prompt: Tensor
    begins: Tensor
    prompt_of: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[np.ndarray], prompts: Sequence[Any], device: torch.device | str, dtype: Any = None
    ) -> PackedSteps:
        """Of each chain its steps [m, 2·D + 4] and the tokens of its prompt."""
        counts = torch.tensor([len(own) for own in rows])
        lengths = [len(prompt) for prompt in prompts]
        return cls(
            torch.from_numpy(np.concatenate(rows)).to(device, dtype),
            torch.from_numpy(np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])).to(device),
            torch.tensor([0, *np.cumsum(lengths)[:-1].tolist()], device=device),
            torch.repeat_interleave(torch.arange(len(rows)), counts).to(device),
        )


def refuse_flow(loaded: LoadedModel) -> None:
    """UserError for what only serves text."""
    if isinstance(loaded, LoadedFlow):
        raise UserError(
            f"'{loaded.name}' is a flow, which draws points and not tokens: train it with `rondel train` (docs/flows.md); "
            "it is not served"
        )


class FlowHead:
    """Stands where a model of text has its head: where the weights lie, and in what."""

    part = None

    def __init__(self, model: Any) -> None:
        self.weight = model.leave.weight


@dataclass(slots=True)
class LoadedFlow(LoadedModel):
    """A model whose `forward` gives velocities. Its policy over chains of points is the Gaussian of each step."""

    @property
    def dim(self) -> int:
        """D of its points."""
        return int(self.model.config.dim)

    @property
    def token_count(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def vocabulary(self) -> int:
        return self.token_count

    @property
    def decoder(self) -> Any:
        return self.model

    def velocity(self, x: Tensor, sigma: Tensor, steps: PackedSteps) -> Tensor:
        """[M, D], [M] -> [M, D], under the prompts of these steps."""
        condition = self.model.condition(steps.prompt, steps.begins)
        found: Tensor = self.model(x, sigma, condition.index_select(0, steps.prompt_of))
        return found

    def evaluate_steps(self, steps: PackedSteps) -> tuple[Tensor, Tensor]:
        """(log-density [M], entropy [M]) of recorded steps under the weights of now, a dimension; in the dtype of the
        rows, which is at least float32.
        """
        dim, rows = self.dim, steps.rows
        if rows.shape[1] != 2 * dim + SCALARS:
            raise ValueError(f"steps of {(rows.shape[1] - SCALARS) / 2:g} dimensions for a flow of {dim}")
        x, drawn, numbers = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim :]
        velocity = self.velocity(x, numbers[:, 0], steps).to(rows.dtype)
        mean = step_mean(x, velocity, numbers[:, 1:])
        return log_density(drawn, mean, numbers[:, 3]), entropy(numbers[:, 3])

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
        return [0.0, *self.evaluate_steps(PackedSteps.of([rows], [tokens], self.device))[0].tolist()]

    def copy_trainable(self) -> LoadedModel:
        model = copy.deepcopy(self.model)
        return replace(self, model=model, head=FlowHead(model))
