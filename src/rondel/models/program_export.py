"""A policy of points or actions as a program of torch alone: `torch.export.load("program.pt2").module()`.

    flow           (x [N, D], sigma [N], prompt [P] tokens) -> velocities [N, D]
    mlp_policy     (observation [N, O])                     -> logits or means of actions [N, A]
    flow_policy    (observation [N, O], noise [N, H·A])     -> chunks of actions [N, H, A], the flow followed without noise

N and P are free. Whoever runs it needs no code of Rondel, and no module of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rondel.models.flow.transition import step_coefficients

PROGRAM = "program.pt2"


class VelocityProgram(nn.Module):
    """One prompt for all points."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        """[N, D], [N], [P] -> [N, D]"""
        condition = self.model.embed(prompt).mean(0)
        velocity: Tensor = self.model(x, sigma, condition.expand(x.shape[0], -1))
        return velocity


class ActionProgram(nn.Module):
    """Logits of actions that are counted, means of those that are numbers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, observation: Tensor) -> Tensor:
        """[N, O] -> [N, A]"""
        out: Tensor = self.model.act(self.model(observation))
        return out


class ChunkProgram(nn.Module):
    """All denoising steps of a chunk."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.steps = [(float(row[0]), float(row[2])) for row in step_coefficients(model.config.denoising_steps, 0.0)]

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        """[N, O], [N, H·A] -> [N, H, A]"""
        states, x = self.model(observation), noise
        for sigma, dt in self.steps:
            x = x + dt * self.model.velocity(x[:, None], x.new_full((1,), sigma), states)[:, 0]
        return x.view(-1, self.model.config.chunk, self.model.config.action_size)


def export_program(model: Any, into: Path) -> Path:
    """Write the program of a module beside its weights. -> its file"""
    model = model.eval()
    config, n = model.config, torch.export.Dim("n", min=1)
    shapes: tuple[Any, ...]
    if hasattr(model, "embed"):
        program: nn.Module = VelocityProgram(model)
        given: tuple[Tensor, ...] = (torch.zeros(3, config.dim), torch.full((3,), 0.5), torch.tensor([0, 1]))
        shapes = ({0: n}, {0: n}, {0: torch.export.Dim("p", min=1)})
    elif hasattr(model, "velocity"):
        program = ChunkProgram(model)
        given = (torch.zeros(3, config.observation_size), torch.zeros(3, config.point_size))
        shapes = ({0: n}, {0: n})
    else:
        program, given, shapes = ActionProgram(model), (torch.zeros(3, config.observation_size),), ({0: n},)
    with torch.no_grad():
        program(*given)  # what a module keeps of its first pass is a constant of the program
        traced = torch.export.export(program, given, dynamic_shapes=shapes)
    torch.export.save(traced, into / PROGRAM)
    return into / PROGRAM
