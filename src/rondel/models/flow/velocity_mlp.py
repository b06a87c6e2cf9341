"""The smallest flow: an MLP that says with which velocity a point moves, given the noise level and a prompt."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from rondel.models.flow.kinds import FLOW_MLP
from rondel.models.flow.transition import sinusoidal
from rondel.models.flow.velocity_model import VelocityConfig, VelocityModel
from rondel.models.row_functions import row_silu


class FlowMlpConfig(VelocityConfig):
    """Of `FlowMlp`."""

    model_type = FLOW_MLP


class FlowMlp(VelocityModel):
    """Layers on the point, its noise level and the prompt; the last one begins at 0."""

    config_class = FlowMlpConfig

    def __init__(self, config: FlowMlpConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.enter = nn.Linear(config.dim + 2 * config.frequencies, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_hidden_layers))
        self.leave = nn.Linear(width, config.dim)
        self.post_init()

    def _begin_at_0(self) -> list[nn.Module]:
        return [self.leave]

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor) -> Tensor:
        """[M, D], [M], [M, W] -> velocities [M, D]"""
        level = sinusoidal(sigma, self.config.frequencies)
        hidden = self.enter(torch.cat([x, level], 1)) + condition
        for layer in self.layers:
            hidden = hidden + layer(row_silu(hidden))
        velocity: Tensor = self.leave(row_silu(hidden))
        return velocity


AutoConfig.register(FlowMlpConfig.model_type, FlowMlpConfig)
AutoModel.register(FlowMlpConfig, FlowMlp)
