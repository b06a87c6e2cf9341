"""Norms and gated activations that keep their inputs alone: the same values and gradients, and fewer bytes."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from kits.engine import SIZE
from kits.families import model as family
from kits.train import apart, awkward_groups, batch, gradient, row, trainer
from rondel.models import cpu_kernels, kept_inputs, load
from rondel.models.load import load_model

KINDS = ["llama", "qwen3", "qwen3_moe", "gemma3_text", "cohere"]


@pytest.fixture(autouse=True)
def torch_operations(monkeypatch):
    """Without the kernels of a CPU, which keep their inputs alone anyway (tests/units/test_cpu_kernels.py)."""
    monkeypatch.setattr(cpu_kernels, "_loaded", None)
    monkeypatch.setattr(load, "chosen_library", lambda: None)


def kept_bytes(run) -> int:
    """The most bytes of storages, without weights, that autograd holds at once: what runs again is held shortly."""
    held, most = Counter[tuple[int, int]](), [0]

    class Kept:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.key = x, (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
            held[self.key] += not isinstance(x, torch.nn.Parameter)
            most[0] = max(most[0], sum(size for (_, size), n in held.items() if n))

        def __del__(self) -> None:
            held[self.key] -= not isinstance(self.x, torch.nn.Parameter)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
        run()
    return most[0]


def plain(monkeypatch) -> None:
    monkeypatch.setattr(kept_inputs, "keep_inputs", lambda run, inputs, weights=(): run(*inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_has_the_plain_bits_and_less_is_kept(kind, monkeypatch):
    algo, found = row("grpo"), []
    b = batch(awkward_groups()[1:], algo)
    for is_plain in (False, True):
        if is_plain:
            plain(monkeypatch)
        t = trainer(copy.deepcopy(family(kind)))
        grads = []
        size = kept_bytes(lambda t=t, grads=grads: grads.append(gradient(t, b, algo)))
        found.append((grads[0], size))
    (ours, less), (theirs, more) = found
    assert apart(ours, theirs) <= 1e-6 and ours.any()
    assert less < more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_alone_and_a_gated_mlp_have_the_plain_bits(dtype, monkeypatch):
    """fp32 stream and 16-bit weights; what is kept is the input, as it came."""
    loaded = load_model({"random": "llama", **SIZE, "seed": 3}, dtype="bfloat16")
    layer = loaded.model.model.layers[0]
    norm, mlp = layer.input_layernorm, layer.mlp
    x = torch.randn(50, SIZE["hidden_size"], generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for is_plain in (False, True):
        if is_plain:
            plain(monkeypatch)
        at = x.clone().requires_grad_()
        out = []
        kept = kept_bytes(lambda at=at, out=out: out.append(norm(at)))
        y = mlp(out[0])
        y.float().sin().sum().backward()
        found.append((y, at.grad, norm.weight.grad.clone(), mlp.up_proj.weight.grad.clone()))
        assert (kept == x.nbytes) != is_plain
        loaded.model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][1].any()


def test_a_copy_of_a_model_reads_its_own_weights():
    loaded = load_model({"random": "llama", **SIZE, "seed": 3}, dtype="float32")
    twin = copy.deepcopy(loaded.model)
    norm = twin.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.mul_(2)
    x = torch.randn(4, SIZE["hidden_size"])
    assert torch.equal(norm(x), 2 * loaded.model.model.layers[0].input_layernorm(x))


def test_a_weight_that_was_written_to_before_the_backward_pass_is_noticed():
    norm = load_model({"random": "llama", **SIZE, "seed": 3}, dtype="float32").model.model.layers[0].input_layernorm
    out = norm(torch.randn(4, SIZE["hidden_size"]))
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()
