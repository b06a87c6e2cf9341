"""A learned model of a world: an ensemble of MLPs from an observation and an action to a distribution of what follows.

It is a model of transformers like any other: `config.json` and safetensors, saved and loaded by its own methods.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from rondel.models.control.kinds import MLP_WORLD

WIDTH = 16  # a multiple of which its outputs are: elementwise functions then give a row the same bits in every batch


class MlpWorldConfig(PreTrainedConfig):
    """observation_size: O. action_size: A numbers of an action, or where `discrete` of how many actions one is chosen.
    ensemble: members. centre, spread: [O] mean and deviation of an observation, with which it is read; step: [O + 1]
    deviation of its change and of the reward, in units of which they are predicted; unset is 0, 1 and 1.
    vocab_size: of the tokenizer that every model has here.
    """

    model_type = MLP_WORLD
    vocab_size: int = 128
    observation_size: int = 0
    action_size: int = 0
    discrete: bool = True
    ensemble: int = 5
    hidden_size: int = 64
    num_hidden_layers: int = 2
    centre: list[float] | None = None
    spread: list[float] | None = None
    step: list[float] | None = None
    max_position_embeddings: int = 1 << 20
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False

    @property
    def outputs(self) -> int:
        """Columns of a head, of which O + 2 are used: the change, the reward, the end."""
        return -(-(self.observation_size + 2) // WIDTH) * WIDTH


class MlpWorld(PreTrainedModel):
    """Members with weights of their own, each with a mean and a log standard deviation of every number that follows.
    arXiv:1805.12114 (PETS), arXiv:1906.08253 (MBPO). A new one says that nothing changes, with the deviation of a step.
    """

    config_class = MlpWorldConfig
    main_input_name = "inputs"

    def __init__(self, config: MlpWorldConfig) -> None:
        super().__init__(config)
        self.members = nn.ModuleList(WorldMember(config) for _ in range(config.ensemble))
        size = config.observation_size
        for name, given, n, plain in (
            ("centre", config.centre, size, 0.0),
            ("spread", config.spread, size, 1.0),
            ("step", config.step, size + 1, 1.0),
        ):
            self.register_buffer(name, torch.tensor(given or [plain] * n), persistent=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            heads = [head for member in self.members for head in (member.mean, member.log_std)]  # type: ignore[union-attr]
            nn.init.orthogonal_(module.weight, 0.01 if any(module is head for head in heads) else math.sqrt(2))
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.members[0].layers[0]  # type: ignore[union-attr, index, return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.members[0].mean  # type: ignore[union-attr, return-value]

    def features(self, observation: Tensor, action: Tensor) -> Tensor:
        """[M, O], [M, D] -> [M, O + A]: the observation in its units; an action that is counted as one of A."""
        if self.config.discrete:
            action = F.one_hot(action[:, 0].long(), self.config.action_size).to(observation.dtype)
        return torch.cat([(observation - self.centre) / self.spread, action], 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[M, O + A] -> (mean [M, E, P], log_std [M, E, P]). Columns: change [O], reward, logit of the end (of the mean)."""
        means, log_stds = zip(*(member(inputs) for member in self.members), strict=True)
        return torch.stack(means, 1), torch.stack(log_stds, 1)


class WorldMember(nn.Module):
    """One MLP, with layers of silu."""

    def __init__(self, config: MlpWorldConfig) -> None:
        super().__init__()
        width = config.hidden_size
        sizes = [config.observation_size + config.action_size, *[width] * config.num_hidden_layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.mean = nn.Linear(width, config.outputs)
        self.log_std = nn.Linear(width, config.outputs)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[M, O + A] -> ([M, P], [M, P])"""
        hidden = inputs
        for layer in self.layers:
            hidden = F.silu(layer(hidden))
        return self.mean(hidden), bounded(self.log_std(hidden))


LOWEST, HIGHEST = -4.0, 2.0  # of a log standard deviation, in units of a step


def bounded(log_std: Tensor) -> Tensor:
    """Smoothly into [LOWEST, HIGHEST], as in arXiv:1805.12114."""
    upper = HIGHEST - F.softplus(HIGHEST - log_std)
    return LOWEST + F.softplus(upper - LOWEST)


AutoConfig.register(MlpWorldConfig.model_type, MlpWorldConfig)
AutoModel.register(MlpWorldConfig, MlpWorld)
