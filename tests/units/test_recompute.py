"""Activations that are computed again: the gradient of every family stays what it is, and less is kept for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kits.engine import ask, engine, prompt
from kits.families import FAMILIES, ONE_OF_EACH
from kits.families import model as family
from kits.sweeps import covering
from kits.train import apart, awkward_groups, batch, gradient, model, row, step, trainer
from rondel.core.errors import ModelError
from rondel.models import recompute as module
from rondel.models.adapters import add_adapter
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recompute import install_recompute
from rondel.planner.activations import activation_bytes, kept_bytes
from rondel.planner.shapes import model_shape

FEW = ("llama", "qwen3_moe", "gemma3n_text", "lfm2", "qwen3_5_text")
# What runs again is a whole layer: of these, each kind is a layer of another family in the list, or sees through its layers.
ALIKE = {
    *(
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_vl_moe",
        "gemma4",
        "gemma4_unified_text",
        "zamba2",
        "bailing_hybrid",
    ),
    *("granitemoehybrid", "jamba", "lfm2_moe", "afmoe", "axk2", "smollm3", "gemma2", "minicpm3"),
}
ALL = covering(FAMILIES, {*ONE_OF_EACH, *FEW} - ALIKE, fast=FEW)


def kept_numbers(t, b, algo) -> int:
    """Numbers that autograd holds for the backward pass outside of what runs again."""
    seen: dict[int, int] = {}

    def count(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter):
            seen[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        gradient(t, b, algo)
    return sum(seen.values())


@pytest.mark.parametrize("kind", ALL)
def test_the_gradient_of_every_family_is_the_plain_one(kind, monkeypatch):
    """One module before and after, two siblings behind a prompt."""
    loaded = copy.deepcopy(family(kind))
    loaded.model.requires_grad_(True)
    tokens = torch.randint(5, 90, (11,), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([*range(6), 4, 5, 6, 7, 8])
    segments = [PackedSegment(0, 4), PackedSegment(4, 2, 0), PackedSegment(6, 5, 0)]
    weights = torch.randn(11, loaded.head.weight.shape[1], generator=torch.Generator().manual_seed(1))

    def gradient_now() -> torch.Tensor:
        loaded.model.zero_grad()
        (loaded.hidden_states(tokens, positions, PackedLayout(segments)) * weights).sum().backward()
        return torch.cat([p.grad.flatten().double() for p in loaded.model.parameters() if p.grad is not None])

    plain, calls = gradient_now(), []
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
    install_recompute(loaded.model, "layers")
    assert apart(gradient_now(), plain) <= 1e-6 and calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_the_gradient_of_a_trainer_is_the_plain_one(kind):
    algo = row("grpo")
    plain, again = (trainer(copy.deepcopy(family(kind)), recompute=how) for how in ("none", "layers"))
    b = batch(awkward_groups()[1:], algo)
    assert apart(gradient(again, b, algo, micro_tokens=60), gradient(plain, b, algo, micro_tokens=60)) <= 1e-6


PARTS = [(kind, parts) for kind in ("llama", "qwen3_moe", "lfm2") for parts in ("mlp", "layers")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parts"), covering(PARTS, [*PARTS[:2], PARTS[3], PARTS[4]]))
def test_less_is_kept_and_a_step_moves_the_same_bits(kind, parts):
    algo = row("ppo") if kind == "llama" else row("grpo")
    plain, again = (trainer(copy.deepcopy(family(kind)), algo, recompute=how) for how in ("none", parts))
    b = batch(awkward_groups(), algo)
    if kind == "llama":
        assert again.critic is not None and plain.critic is not None
    elif parts == "layers":
        assert kept_numbers(again, b, algo) < 0.7 * kept_numbers(plain, b, algo)
    for t in (plain, again):
        assert step(t, batch(awkward_groups(), algo), algo).stepped
    weights = [list(t.weights.masters) + (list(t.critic.weights.masters) if t.critic else []) for t in (plain, again)]
    assert all(torch.equal(a, b) for a, b in zip(*weights))


@pytest.mark.slow
def test_an_adapter_runs_again_as_it_ran():
    algo, grads = row("grpo"), []
    for how in ("none", "layers"):
        loaded = model()
        add_adapter(loaded, rank=4, alpha=8)
        with loaded.randomized_adapter():
            noise = [p.clone() for p in loaded.model.parameters() if p.requires_grad]
        for parameter, values in zip((p for p in loaded.model.parameters() if p.requires_grad), noise):
            parameter.data.copy_(values)
        t = trainer(loaded, recompute=how)
        grads.append(gradient(t, batch(awkward_groups(), algo), algo))
    assert torch.equal(*grads) and grads[0].any()


def test_the_engine_runs_each_layer_once():
    import asyncio

    loaded = model()
    install_recompute(loaded.model, "layers")
    calls = []
    layer = loaded.model.model.layers[0]
    layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    e = engine(loaded)
    steps = e.runner.step
    e.runner.step = lambda *a, **k: calls.append(0) or steps(*a, **k)
    asyncio.run(e.generate(ask(prompt(1, 6), n=5)))
    assert calls.count(1) == calls.count(0)


def test_a_part_that_no_layer_has_is_refused():
    loaded = family("mamba")
    with pytest.raises(ModelError, match="no such part"):
        install_recompute(copy.deepcopy(loaded.model), "mlp")


def test_the_plan_counts_what_is_kept():
    shape = model_shape("7b")
    everything = activation_bytes(shape, 2)
    layers, mlp = (kept_bytes(shape, 2, everything, parts) for parts in ("layers", "mlp"))
    assert kept_bytes(shape, 2, everything, "none") == everything
    assert layers == 4 * shape.layers * shape.hidden + everything / shape.layers  # the residual stream is fp32
    assert layers < mlp < 0.6 * everything
