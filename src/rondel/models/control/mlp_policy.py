"""An MLP from an observation to the distribution of an action, as stable-baselines3's MlpPolicy has it.

It is a model of transformers like any other: `config.json` and safetensors, saved and loaded by its own methods.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from rondel.models.control.kinds import MLP_POLICY
from rondel.models.control.observation_mlp import ObservationConfig, ObservationMlp


class MlpPolicyConfig(ObservationConfig):
    """log_std: where the logarithm of the standard deviation begins, of actions that are numbers."""

    model_type = MLP_POLICY
    log_std: float = 0.0


class MlpPolicy(ObservationMlp):
    """Its linear layer gives logits [M, A], or the mean of a Gaussian [M, A],
    whose log_std [A] no observation moves."""

    config_class = MlpPolicyConfig
    only_drawing = ("log_std",)
    log_std: nn.Parameter | None

    def __init__(self, config: MlpPolicyConfig) -> None:
        super().__init__(config, config.action_size)
        std = None if config.discrete else nn.Parameter(torch.full((config.action_size,), float(config.log_std)))
        self.register_parameter("log_std", std)
        self.post_init()


AutoConfig.register(MlpPolicyConfig.model_type, MlpPolicyConfig)
AutoModel.register(MlpPolicyConfig, MlpPolicy)
