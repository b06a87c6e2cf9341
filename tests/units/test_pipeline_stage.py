"""A model in stages, all in one process: layers are split by work, and every family that can be split computes the same."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from dataclasses import replace

import pytest
import torch

from kits.families import FAMILIES
from kits.families import model as family
from kits.train import apart, model
from rondel.core.errors import ModelError
from rondel.models import vision
from rondel.models.layer_split import drop_parameters, layers_of_stage, split_layers
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.pipeline_stage import PipelineStage

# inputs of each layer beside the hidden states, stacks that run several times, layers that read the embeddings again, one layer
APART = ("gemma3n_text", "gemma4_text", "gemma4", "hrm_text", "zamba", "zamba2", "longcat_flash", "zaya")
SPLIT = [kind for kind in FAMILIES if kind not in APART]


class LocalLink:
    """What a StageLink does, between stages of this process."""

    leads, ranks, back, device = True, "ranks", "back", torch.device("cpu")

    def __init__(self, index: int, size: int, wires: dict) -> None:
        self.index, self.size, self.wires = index, size, wires
        self.is_last = index == size - 1

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


def stages_of(loaded, size: int) -> list:
    """The same model in `size` stages, behind each other."""
    wires: dict = {}
    made = []
    for index in range(size):
        own = loaded.copy_trainable()
        decoder, tower = own.decoder, []
        if own.sight is not None:
            decoder, tower = vision.language_model(own.model), [*vision.vision_tower(own.model).parameters()]
        layers = layers_of_stage(own.model, decoder, size, index, whole=tower)
        drop_parameters(own.model, layers.held)
        made.append(replace(own, stage=PipelineStage(own.model, layers, LocalLink(index, size, wires), own.dtype)))
    return made


def pass_through(stages: list, tokens, positions, layout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Last hidden states of the last one, and what the others' backward passes begin with."""
    sent = [s.stage.send_forward(s.hidden_states(tokens, positions, layout())) for s in stages[:-1]]
    return stages[-1].hidden_states(tokens, positions, layout()), sent


def test_layers_are_split_by_work():
    assert split_layers([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert split_layers([1, 1, 1, 1], 2, head=2) == [range(3), range(3, 4)]
    assert split_layers([5, 1, 1, 1, 1, 1], 2) == [range(1), range(1, 6)]
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    for stages in range(1, 8):
        runs = split_layers(costs, stages, head=2.5)
        assert [i for run in runs for i in run] == [*range(7)] and all(runs)
        got = max(sum(costs[i] for i in run) + 2.5 * (run is runs[-1]) for run in runs)
        cuts = ([0, *c, 7] for c in itertools.combinations(range(1, 7), stages - 1))
        every = (max(sum(costs[a:b]) + 2.5 * (b == 7) for a, b in itertools.pairwise(at)) for at in cuts)
        assert got == min(every)


def a_row():
    """Two siblings behind a prompt: tokens, positions, a fresh layout."""
    tokens = torch.randint(5, 90, (11,), generator=torch.Generator().manual_seed(0))
    segments = [PackedSegment(0, 4), PackedSegment(4, 2, 0), PackedSegment(6, 5, 0)]
    return tokens, torch.tensor([*range(6), 4, 5, 6, 7, 8]), lambda: PackedLayout(segments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPLIT)
def test_a_family_in_two_stages_is_the_same_model(kind):
    loaded = copy.deepcopy(family(kind))
    loaded.model.requires_grad_(True)
    tokens, positions, layout = a_row()
    weights = torch.randn(11, loaded.head.weight.shape[1], generator=torch.Generator().manual_seed(1))
    stages = stages_of(loaded, 2)
    whole = loaded.hidden_states(tokens, positions, layout())
    (whole * weights).sum().backward()
    hidden, sent = pass_through(stages, tokens, positions, layout)
    torch.testing.assert_close(hidden, whole)
    (hidden * weights).sum().backward()
    for one in reversed(sent):
        one.backward()
    expected = {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for n, p in stage.model.named_parameters():
            if p.grad is not None:
                found[n] = found[n] + p.grad if n in found else p.grad
    assert found.keys() == expected.keys()
    assert apart(*(torch.cat([of[n].flatten() for n in expected]) for of in (found, expected))) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_what_needs_more_than_hidden_states_is_never_silently_wrong(kind):
    """It does not run, or what it gives is not a number; a trainer tries every model and refuses it (train/fsdp.py)."""
    tokens, positions, layout = a_row()
    try:
        hidden, _ = pass_through(stages_of(family(kind), 2), tokens, positions, layout)
    except (RuntimeError, AttributeError, ModelError):
        return
    assert hidden.isnan().any()


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ModelError, match=r"pp = 3.*has 2 layers"):
        stages_of(family("llama"), 3)


def test_a_tied_matrix_is_held_at_both_ends():
    loaded = model("deep")
    layers = [layers_of_stage(loaded.model, loaded.decoder, 3, i) for i in range(3)]
    matrix = "model.embed_tokens.weight"
    assert [matrix in one.held for one in layers] == [True, False, True]
    assert all(one.shared == {matrix} for one in layers)
    every = {name for name, _ in loaded.model.named_parameters()}
    assert frozenset.union(*(one.held for one in layers)) == every
    assert "model.norm.weight" in layers[2].held and sum(len(one.own) for one in layers) == 5
