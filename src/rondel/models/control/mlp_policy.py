"""An MLP from an observation to the distribution of an action, as stable-baselines3's MlpPolicy has it.

It is a model of transformers like any other: `config.json` and safetensors, saved and loaded by its own methods.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from rondel.models.control.kinds import MLP_POLICY


class MlpPolicyConfig(PreTrainedConfig):
    """observation_size: O. action_size: A numbers of an action, or where `discrete` of how many actions one is chosen.
    log_std: where the logarithm of the standard deviation begins, of actions that are numbers. vocab_size: of the
    tokenizer that every model has here.
    """

    model_type = MLP_POLICY
    vocab_size: int = 128
    observation_size: int = 0
    action_size: int = 0
    discrete: bool = True
    hidden_size: int = 64
    num_hidden_layers: int = 2
    log_std: float = 0.0
    max_position_embeddings: int = 1 << 20
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False


class MlpPolicy(PreTrainedModel):
    """Layers of tanh on the observation, orthogonal at the beginning, and a linear layer whose gain begins at 0.01:
    logits [M, A], or the mean of a Gaussian [M, A], whose log_std [A] no observation moves.
    """

    config_class = MlpPolicyConfig
    main_input_name = "observation"
    log_std: nn.Parameter | None

    def __init__(self, config: MlpPolicyConfig) -> None:
        super().__init__(config)
        widths = [config.observation_size, *[config.hidden_size] * config.num_hidden_layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.act = nn.Linear(config.hidden_size, config.action_size)
        std = None if config.discrete else nn.Parameter(torch.full((config.action_size,), float(config.log_std)))
        self.register_parameter("log_std", std)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, 0.01 if module is self.act else math.sqrt(2))
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.layers[0]

    def get_output_embeddings(self) -> nn.Module:
        return self.act

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Another layer behind the same states, a critic's: nothing is drawn then."""
        self.act = new_embeddings  # type: ignore[assignment]
        self.register_parameter("log_std", None)

    def forward(self, observation: Tensor) -> Tensor:
        """[M, O] -> states [M, W]"""
        hidden = observation
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden


AutoConfig.register(MlpPolicyConfig.model_type, MlpPolicyConfig)
AutoModel.register(MlpPolicyConfig, MlpPolicy)
