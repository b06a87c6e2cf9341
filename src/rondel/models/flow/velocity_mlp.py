"""The smallest flow: an MLP that says with which velocity a point moves, given the noise level and a prompt.

It is a model of transformers like any other: `config.json` and safetensors, saved and loaded by its own methods.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from rondel.models.flow.transition import sinusoidal


class FlowMlpConfig(PreTrainedConfig):
    """Of `FlowMlp`. dim: D of a point; frequencies: of the noise level; max_position_embeddings: most tokens of a prompt
    and steps behind it.
    """

    model_type = "flow_mlp"

    vocab_size: int = 128
    dim: int = 2
    hidden_size: int = 64
    num_hidden_layers: int = 3
    frequencies: int = 6
    max_position_embeddings: int = 1024
    eos_token_id: int | None = None


class FlowMlp(PreTrainedModel):
    """v(x, sigma, prompt).  A prompt is the mean of its tokens' embeddings. The last layer begins at 0, so a new flow
    says that nothing moves.
    """

    config_class = FlowMlpConfig
    main_input_name = "x"

    def __init__(self, config: FlowMlpConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.enter = nn.Linear(config.dim + 2 * config.frequencies, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_hidden_layers))
        self.leave = nn.Linear(width, config.dim)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            scale = 0.0 if module is self.leave else module.in_features**-0.5
            nn.init.normal_(module.weight, std=scale)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> None:
        """It has no words to say."""
        return None

    def condition(self, prompt: Tensor, begins: Tensor) -> Tensor:
        """Tokens of n prompts behind each other, and where each begins -> [n, W]."""
        return F.embedding_bag(prompt, self.embed.weight, begins, mode="mean")

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor) -> Tensor:
        """[M, D], [M], [M, W] -> velocities [M, D]"""
        level = sinusoidal(sigma, self.config.frequencies)
        hidden = self.enter(torch.cat([x, level], 1)) + condition
        for layer in self.layers:
            hidden = hidden + layer(F.silu(hidden))
        velocity: Tensor = self.leave(F.silu(hidden))
        return velocity


AutoConfig.register(FlowMlpConfig.model_type, FlowMlpConfig)
AutoModel.register(FlowMlpConfig, FlowMlp)
