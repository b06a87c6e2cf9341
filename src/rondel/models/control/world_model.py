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
from rondel.models.row_functions import by_rows, row_silu

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
        """Columns of a head, of which O + 1 are used: the change and the reward."""
        return -(-(self.observation_size + 1) // WIDTH) * WIDTH


class MlpWorld(PreTrainedModel):
    """Members with weights of their own, each with a mean and a log standard deviation of every number that follows an
    observation and an action, and the probability that the world ends where it has come to.
    arXiv:1805.12114 (PETS), arXiv:1906.08253 (MBPO). A new one says that nothing changes, with the deviation of a step.
    """

    config_class = MlpWorldConfig
    main_input_name = "inputs"

    def __init__(self, config: MlpWorldConfig) -> None:
        super().__init__(config)
        self.members = nn.ModuleList(WorldMember(config) for _ in range(config.ensemble))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            heads = [head for member in self._members for head in (member.mean, member.log_std, member.end)]
            nn.init.orthogonal_(module.weight, 0.01 if any(module is head for head in heads) else math.sqrt(2))
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self._members[0].layers[0]

    def get_output_embeddings(self) -> nn.Module:
        return self._members[0].mean

    @property
    def _members(self) -> list[WorldMember]:
        return [member for member in self.members if isinstance(member, WorldMember)]

    def step_scale(self, like: Tensor) -> Tensor:
        """[O + 1] `config.step`"""
        return like.new_tensor(self.config.step or [1.0] * (self.config.observation_size + 1))

    def in_units(self, observation: Tensor) -> Tensor:
        """[M, O] -> [M, O], less `config.centre` and divided by `config.spread`."""
        size = self.config.observation_size
        centre = observation.new_tensor(self.config.centre or [0.0] * size)
        return (observation - centre) / observation.new_tensor(self.config.spread or [1.0] * size)

    def features(self, observation: Tensor, action: Tensor) -> Tensor:
        """[M, O], [M, D] -> [M, O + A]: the observation in its units; an action that is counted as one of A."""
        if self.config.discrete:
            action = F.one_hot(action[:, 0].long(), self.config.action_size).to(observation.dtype)
        return torch.cat([self.in_units(observation), action], 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[M, O + A] -> mean and log_std [M, E, P] of change [O] and reward, in units of a step."""
        means, log_stds = zip(*(member(inputs) for member in self._members), strict=True)
        return torch.stack(means, 1), torch.stack(log_stds, 1)

    def end_logits(self, after: Tensor) -> Tensor:
        """[M, E] of the probability that the world ends where it has come to [M, E, O], for each member its own."""
        each = [member.end_logit(self.in_units(after[:, i])) for i, member in enumerate(self._members)]
        return torch.stack(each, 1)


class WorldMember(nn.Module):
    """Two MLPs with layers of silu: what follows an action, and whether that is an end."""

    def __init__(self, config: MlpWorldConfig) -> None:
        super().__init__()
        width = config.hidden_size
        hidden = [width] * config.num_hidden_layers
        self.layers = _layers([config.observation_size + config.action_size, *hidden])
        self.mean = nn.Linear(width, config.outputs)
        self.log_std = nn.Linear(width, config.outputs)
        self.end_layers = _layers([config.observation_size, *hidden])
        self.end = nn.Linear(width, WIDTH)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[M, O + A] -> ([M, P], [M, P])"""
        hidden = inputs
        for layer in self.layers:
            hidden = row_silu(layer(hidden))
        return self.mean(hidden), bounded(self.log_std(hidden))

    def end_logit(self, after: Tensor) -> Tensor:
        """[M, O] -> [M]"""
        hidden = after
        for layer in self.end_layers:
            hidden = row_silu(layer(hidden))
        found: Tensor = self.end(hidden)[:, 0]
        return found


def _layers(sizes: list[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))


LOWEST, HIGHEST = -4.0, 2.0  # of a log standard deviation, in units of a step


def bounded(log_std: Tensor) -> Tensor:
    """Smoothly into [LOWEST, HIGHEST], as in arXiv:1805.12114."""
    upper = HIGHEST - by_rows(F.softplus, HIGHEST - log_std)
    return LOWEST + by_rows(F.softplus, upper - LOWEST)


AutoConfig.register(MlpWorldConfig.model_type, MlpWorldConfig)
AutoModel.register(MlpWorldConfig, MlpWorld)
