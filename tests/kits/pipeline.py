"""A model in stages, all of them in one process."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from rondel.models import vision
from rondel.models.layer_split import drop_parameters, layers_of_stage
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.pipeline_stage import PipelineStage


class LocalLink:
    """What a StageLink does, between stages of this process."""

    leads, ranks, back, device = True, "ranks", "back", torch.device("cpu")

    def __init__(self, index: int, size: int, wires: dict) -> None:
        self.index, self.size, self.wires = index, size, wires
        self.is_last, self.next, self.before = index == size - 1, (index + 1) % size, (index - 1) % size

    def _wire(self, *key) -> deque:
        return self.wires.setdefault(key, deque())

    def send(self, x, to, group):
        self._wire(self.index, to, group).append(x.detach().clone())

    def receive(self, shape, dtype, source, group):
        x = self._wire(source, self.index, group).popleft()
        assert (tuple(x.shape), x.dtype) == (tuple(shape[-x.ndim :]), dtype)
        return x.view(shape)

    def send_object(self, value, to):
        self._wire(self.index, to).append(value)

    def receive_object(self, source):
        return self._wire(source, self.index).popleft()


def stages_of(loaded, size: int, chunks: int = 1) -> list:
    """The same model in `size` stages, behind each other, each of so many chunks."""
    wires: dict = {}
    made = []
    for index in range(size):
        own = loaded.copy_trainable()
        decoder, tower = own.decoder, []
        if own.sight is not None:
            decoder, tower = vision.language_model(own.model), [*vision.vision_tower(own.model).parameters()]
        layers = layers_of_stage(own.model, decoder, size, index, chunks=chunks, whole=tower)
        drop_parameters(own.model, layers.held)
        made.append(replace(own, stage=PipelineStage(own.model, layers, LocalLink(index, size, wires), own.dtype)))
    return made


def pass_through(stages: list, tokens, positions, layout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Last hidden states of the last one's last chunk, and what the other backward passes begin with."""
    passes = [(s, chunk) for chunk in range(len(stages[0].stage.layers.runs)) for s in stages]
    sent = []
    for s, chunk in passes:
        s.stage.chunk = chunk
        hidden = s.hidden_states(tokens, positions, layout())
        if (s, chunk) != passes[-1]:
            sent.append(s.stage.send_forward(hidden))
    return hidden, sent


def siblings_row():
    """Two siblings behind a prompt: tokens, positions, a fresh layout."""
    tokens = torch.randint(5, 90, (11,), generator=torch.Generator().manual_seed(0))
    segments = [PackedSegment(0, 4), PackedSegment(4, 2, 0), PackedSegment(6, 5, 0)]
    return tokens, torch.tensor([*range(6), 4, 5, 6, 7, 8]), lambda: PackedLayout(segments)
