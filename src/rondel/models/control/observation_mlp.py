"""What every policy of actions has: layers on the observation, and a linear layer behind them that acts."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


class ObservationConfig(PreTrainedConfig):
    """observation_size: O. action_size: A numbers of an action, or where `discrete` of how many actions one is chosen.
    hidden_size, num_hidden_layers: of the layers on the observation. vocab_size: of the tokenizer that every model has
    here.
    """

    vocab_size: int = 128
    observation_size: int = 0
    action_size: int = 0
    discrete: bool = True
    hidden_size: int = 64
    num_hidden_layers: int = 2
    max_position_embeddings: int = 1 << 20
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False

    @property
    def input_size(self) -> int:
        """How many numbers the first layer reads."""
        return self.observation_size


class ObservationMlp(PreTrainedModel):
    """Layers of tanh on the observation, orthogonal at the beginning, and `act`, whose gain begins at 0.01.

    only_drawing  names of what is there to draw actions and for nothing else
    """

    main_input_name = "observation"
    only_drawing: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, outputs: int) -> None:
        super().__init__(config)
        widths = [config.input_size, *[config.hidden_size] * config.num_hidden_layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.act = nn.Linear(config.hidden_size, outputs)

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
        for name in self.only_drawing:
            setattr(self, name, None)

    def forward(self, observation: Tensor) -> Tensor:
        """[M, O] -> states [M, W]"""
        hidden = observation
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden
