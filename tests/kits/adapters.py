"""A trained LoRA adapter, what the trainer computes with it, and a trainer that publishes it."""

from __future__ import annotations

import torch

from kits.train import row, trainer
from rondel.models.loaded_model import LoadedModel
from rondel.sync.from_tensor import FromTensor
from rondel.train.annotate import annotate_logprobs


def noise(loaded: LoadedModel, seed: int = 0, size: float = 0.1) -> LoadedModel:
    """An adapter that changes every layer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in loaded.adapter.layers.values():
            weight = layer.lora_B["default"].weight
            weight.copy_(size * torch.randn(weight.shape, generator=generator))
    return loaded


def trained(loaded: LoadedModel, rows: list[list[int]]) -> list[list[float]]:
    """Logprobs of whole rows by the trainer's path, of every token after the first."""
    from rondel.core.types import Group, Score, Task, Trajectory
    from rondel.train.pack import batch_of

    groups = []
    for i, tokens in enumerate(rows):
        t = Trajectory()
        t.extend(tokens[:1])
        t.extend(tokens[1:], logprobs=[-1.0] * (len(tokens) - 1), versions=[0] * (len(tokens) - 1))
        t.score = Score(0.0)
        groups.append(Group(i, Task(f"t{i}", "fake", {}), [t], 0))
    b = annotate_logprobs(loaded, batch_of(groups), "trained", budget=64, temperature=1.0)
    return [s.known.trained.numpy().tolist() for s in b.samples]


def publisher(loaded: LoadedModel):
    t = trainer(loaded, row())
    t.publisher.transport = FromTensor()
    return t
