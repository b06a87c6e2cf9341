"""A flow from noise to a chunk of actions, given an observation, as the action head of pi0 (arXiv:2410.24164) has it.

It is a model of transformers like any other: `config.json` and safetensors, saved and loaded by its own methods.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from rondel.models.control.kinds import CHUNK, FLOW_POLICY, STEPS
from rondel.models.control.observation_mlp import ObservationConfig, ObservationMlp
from rondel.models.elementwise import silu
from rondel.models.flow.transition import sinusoidal


class FlowPolicyConfig(ObservationConfig):
    """chunk: H actions that are drawn together. denoising_steps: K. num_denoising_layers: behind the point, its noise
    level and the states of the observation; frequencies: of the noise level.
    """

    model_type = FLOW_POLICY
    discrete: bool = False
    chunk: int = CHUNK
    denoising_steps: int = STEPS
    num_denoising_layers: int = 1
    frequencies: int = 6

    @property
    def point_size(self) -> int:
        """D = H·A numbers of a chunk."""
        return self.chunk * self.action_size

    @property
    def act_size(self) -> int:
        """How many numbers the last layer gives."""
        return self.point_size


class FlowPolicy(ObservationMlp):
    """v(x, sigma | observation) = (x - chunk(x, sigma, observation)) / sigma: what is learned is the chunk to which a
    point on its way belongs, and the velocity of the flow leads there. A new one sees a chunk near to 0 in every point,
    so the noise with which it begins does not stay in its actions.
    """

    config_class = FlowPolicyConfig
    only_drawing: ClassVar[tuple[str, ...]] = ("enter", "mix")

    def __init__(self, config: FlowPolicyConfig) -> None:
        super().__init__(config, config.act_size)
        width = config.hidden_size
        self.enter = nn.Linear(config.point_size + 2 * config.frequencies, width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_denoising_layers))
        self.post_init()

    def velocity(self, x: Tensor, sigma: Tensor, states: Tensor) -> Tensor:
        """[M, S, D], [S], [M, W] -> [M, S, D], at S noise levels above 0."""
        level = sinusoidal(sigma, self.config.frequencies).expand(x.shape[0], -1, -1)
        hidden = self.enter(torch.cat([x, level], 2)) + states[:, None]
        for layer in self.mix:
            hidden = hidden + layer(silu(hidden))
        chunk: Tensor = self.act(silu(hidden))
        return (x - chunk) / sigma[:, None]


AutoConfig.register(FlowPolicyConfig.model_type, FlowPolicyConfig)
AutoModel.register(FlowPolicyConfig, FlowPolicy)
