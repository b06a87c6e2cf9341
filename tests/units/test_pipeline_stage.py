"""Layers are split by work, and a stage holds what its layers read; that every family computes the same in stages is in
tests/parity/test_families.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from kits.families import model as family
from kits.pipeline import pass_through, siblings_row, stages_of
from kits.train import model
from rondel.core.errors import ModelError
from rondel.models.layer_split import layers_of_stage, split_layers


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


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["deep"])
def test_chunks_compute_what_one_model_does(size, kind):
    """Hidden states, and the gradient of every weight: of a pass through one chunk after the other, and of a pass without a
    gradient, which goes through all of a stage's.
    """
    loaded = model(kind)
    loaded.model.requires_grad_(True)
    tokens, positions, layout = siblings_row()
    whole = loaded.hidden_states(tokens, positions, layout())
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    names, owned = zip(*loaded.model.named_parameters())
    grads = torch.autograd.grad((whole * weights).sum(), owned, allow_unused=True)
    stages = stages_of(loaded, size, chunks=2)
    for stage in stages:
        stage.model.requires_grad_(True)
        assert len(stage.stage.layers.runs) == 2
    hidden, sent = pass_through(stages, tokens, positions, layout)
    torch.testing.assert_close(hidden, whole)
    (hidden * weights).sum().backward()
    for one in reversed(sent):
        one.backward()
    expected = {name: grad for name, grad in zip(names, grads) if grad is not None}
    found = {n: p.grad for stage in stages for n, p in stage.model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)
    for stage in stages:
        layers = [block for block in stage.stage.layers.own_blocks]
        assert [*stage.decoder.layers].count(layers[0]) == 1, "what was passed over is there again"


def test_more_chunks_than_layers_are_refused():
    with pytest.raises(ModelError, match=r"pp = 2 and chunks = 3.*has 5 layers: every chunk of a stage needs one"):
        stages_of(model("deep"), 2, chunks=3)


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
    assert "model.norm.weight" in layers[2].held and [i for one in layers for run in one.runs for i in run] == [
        *range(5)
    ]
