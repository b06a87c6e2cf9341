"""What every velocity model has: its sizes, and a prompt that is read as the mean of its tokens' embeddings.

It is a model of transformers like any other: `config.json` and safetensors, saved and loaded by its own methods.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


class VelocityConfig(PreTrainedConfig):
    """dim: D of a point; frequencies: of the noise level; max_position_embeddings: most tokens of a prompt and steps
    behind it.
    """

    vocab_size: int = 128
    dim: int = 2
    hidden_size: int = 64
    num_hidden_layers: int = 3
    frequencies: int = 6
    max_position_embeddings: int = 1024
    eos_token_id: int | None = None


class VelocityModel(PreTrainedModel):
    """v(x, sigma, prompt).  [M, D], [M], [M, W] -> [M, D]  A new one says that nothing moves."""

    main_input_name = "x"
    embed: nn.Embedding

    def _begin_at_0(self) -> list[nn.Module]:
        """The linear layers without which nothing moves."""
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.0 if module in self._begin_at_0() else module.in_features**-0.5)
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
