"""Halves of a layer: values and gradients against float64, bits that depend on nothing but the row, sums of gradients,
and the passes that go through modules.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from kits.engine import SIZE
from kits.pairs import use_pairs
from rondel.core.events import Warned, subscribe
from rondel.models import layer_halves
from rondel.models.attention import use_attention_layout
from rondel.models.head import LMHead
from rondel.models.linear import equal_blocks, modules_alone, outside_graph
from rondel.models.load import load_model
from rondel.models.main_grad import own_parameter
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recompute import install_recompute

bf16, fp32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"num_key_value_heads": 5},
    "qwen3": {"head_dim": 32},
}


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    use_pairs(monkeypatch)


def model(kind="llama", dtype=bf16, **config):
    """Random weights, three times as large as they begin."""
    config = SIZE | {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1} | FAMILIES[kind] | config
    loaded = load_model({"random": kind, "seed": 3, **config}, dtype=str(dtype).removeprefix("torch."))
    with torch.no_grad():
        for i, p in enumerate(loaded.model.parameters()):
            p.mul_(3) if p.dim() > 1 else p.add_(torch.linspace(-0.4, 0.4, len(p)).mul(1 - i % 3).to(dtype))
    return loaded


def exact_gradients(loaded, tokens):
    """Those of the same weights in float64, through the modules."""
    exact = copy.deepcopy(loaded.model).double()
    exact.get_input_embeddings().fp32_stream = False
    with modules_alone():
        return gradients(replace(loaded, model=exact, head=LMHead.from_model(exact)), tokens)


def hidden_of(loaded, tokens=23):
    """A prompt and two answers behind it."""
    answers = (tokens - tokens // 2) // 2
    lengths = [tokens // 2, answers, tokens - tokens // 2 - answers]
    starts = [sum(lengths[:i]) for i in range(3)]
    segments = [PackedSegment(start, n, 0 if start else None) for start, n in zip(starts, lengths) if n]
    positions = torch.cat([torch.arange(lengths[0]), *(lengths[0] + torch.arange(n) for n in lengths[1:])])
    return loaded.hidden_states((torch.arange(tokens) * 7 + 3) % 50, positions, PackedLayout(segments))


def gradients(loaded, tokens=23):
    """Hidden states, and the gradients of all weights by name."""
    hidden = hidden_of(loaded, tokens)
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
    (hidden.double() * pull).sum().backward()
    found = {name: p.grad.double() for name, p in loaded.model.named_parameters() if p.grad is not None}
    loaded.model.zero_grad()
    return {"hidden": hidden.detach().double(), **found}


def halves_of(loaded):
    """Those of layers that run twice, too."""
    partials = [layer.forward for layer in loaded.model.model.layers]
    return [(one if hasattr(one.func, "__self__") else one.args[0]).func.__self__ for one in partials]


WIDE = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024, "num_hidden_layers": 1}


@DTYPES
@pytest.mark.parametrize("tokens", [4, 23, pytest.param(900, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*FAMILIES, "wide"])
def test_values_and_gradients_are_as_near_to_float64_as_those_of_modules(kind, tokens, dtype):
    loaded = model("llama", dtype, **WIDE) if kind == "wide" else model(kind, dtype)
    ours = gradients(loaded, tokens)
    assert all(half._fits for half in halves_of(loaded))
    with modules_alone():
        theirs = gradients(loaded, tokens)
    truth = exact_gradients(loaded, tokens)
    assert ours.keys() == theirs.keys() == truth.keys() and len(ours) > 10
    off, usual = (
        {name: float((x - truth[name]).norm() / truth[name].norm()) for name, x in found.items()}
        for found in (ours, theirs)
    )
    assert 0 < sum(off.values()) < (1.1 if dtype == bf16 else 2) * sum(usual.values())
    assert all(
        off[name] < (1.5 * usual[name] + 1e-3 if dtype == bf16 else max(2e-6, 1.2 * usual[name])) for name in off
    ), {n: (off[n], usual[n]) for n in off}


@DTYPES
@pytest.mark.parametrize("recompute", ["none", "mlp", "layers"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_layer_in_one_step_has_the_bits_of_its_attention(kind, recompute, dtype, monkeypatch):
    """From its second pass on the attention's own code is left out."""
    loaded = model(kind, dtype, hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32)
    install_recompute(loaded.model, recompute)
    first, windows = gradients(loaded), {half._rule.window for half in halves_of(loaded)}
    assert windows == ({9} if kind == "mistral" else {None})
    monkeypatch.setattr(layer_halves, "_forward_of", None)
    again = gradients(loaded)
    with torch.no_grad():
        assert torch.equal(hidden_of(loaded).double(), first["hidden"])
    assert first.keys() == again.keys() and all(torch.equal(x, again[name]) for name, x in first.items())
    sums = {}
    for name, p in loaded.model.named_parameters():
        main = p.detach().float()
        main.grad = torch.zeros_like(main)
        own_parameter(p, main)
        sums[name] = main
    gradients(loaded)
    for name in [n for n in sums if not n.endswith("bias") and "layers" in n]:
        assert torch.equal(sums[name].grad.to(dtype).double(), first[name]), f"{name}: unrounded where it is summed"


@DTYPES
def test_a_gradients_room_is_written_before_it_is_added_to(dtype, monkeypatch):
    loaded = model(dtype=dtype)
    wanted = {}
    for empty in (False, True):
        masters = {name: p.detach().float() for name, p in loaded.model.named_parameters()}
        for name, p in loaded.model.named_parameters():
            masters[name].grad = None if empty else torch.zeros_like(masters[name])
            own_parameter(p, masters[name])
        if empty:
            monkeypatch.setattr(torch, "empty_like", lambda x, **_: torch.full_like(x, float("nan")))
        for _ in range(2):
            gradients(loaded)
        for name, master in masters.items():
            if "layers" in name:
                assert torch.equal(master.grad, wanted.setdefault(name, master.grad)), name
    assert len(wanted) > 15


def test_an_attention_that_was_changed_goes_through_its_own_code():
    loaded = model("qwen2", hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
    first = gradients(loaded)["hidden"]
    for layer in loaded.model.model.layers:
        layer.self_attn.scaling *= 2
    changed = gradients(loaded)["hidden"]
    with modules_alone():
        wanted = gradients(loaded)["hidden"]
    assert (changed - wanted).norm() < 0.2 * (changed - first).norm()


def test_an_attention_with_other_code_keeps_it():
    loaded = model("llama", hidden_size=96, num_attention_heads=3)
    attentions = [layer.self_attn for layer in loaded.model.model.layers]
    plain = type(attentions[0]).forward

    def doubled(self, hidden_states, **kwargs):
        out, weights = plain(self, hidden_states, **kwargs)
        return 2 * out, weights

    for attention in attentions:
        attention.forward = functools.partial(doubled, attention)
    first = gradients(loaded)
    assert [half._rule for half in halves_of(loaded)] == [False, False], "whatever its rule"
    again = gradients(loaded)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


@DTYPES
def test_bits_do_not_depend_on_gradients_threads_or_company(dtype):
    loaded, before = model("qwen3", dtype), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(gradients(loaded, 500))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], x) for name, x in other.items())
    with torch.no_grad():
        assert torch.equal(hidden_of(loaded, 500).double(), found[0]["hidden"])
        layer = loaded.model.model.layers[0]
        stream, attended = torch.randn(500, 80), torch.randn(500, 160).to(dtype)
        whole = [*layer_halves._front(layer, stream)[:3], layer_halves._back(layer, attended, stream)]
        for rows in (slice(0, 1), slice(17, 40), slice(130, 499)):
            own = [
                *layer_halves._front(layer, stream[rows])[:3],
                layer_halves._back(layer, attended[rows], stream[rows]),
            ]
            assert all(torch.equal(a, b[rows]) for a, b in zip(own, whole, strict=True))


@DTYPES
def test_gradients_of_weights_are_added_to_the_optimizers_sums(dtype):
    loaded = model(dtype=dtype)
    hidden_of(loaded)  # the proof, which must add nothing
    plain = [gradients(loaded, n) for n in (23, 40)]
    masters = {name: p.detach().float() for name, p in loaded.model.named_parameters()}
    for name, p in loaded.model.named_parameters():
        own_parameter(p, masters[name])
    for n in (23, 40):
        gradients(loaded, n)
    for name in (name for name in masters if "_proj" in name):
        got, want = masters[name].grad, plain[0][name] + plain[1][name]
        assert got is not None and got.dtype == torch.float32
        off = 0.01 if dtype == bf16 else 1e-5
        torch.testing.assert_close(got.double(), want, rtol=off, atol=float(want.abs().max()) * off)
        assert float((got - got.to(bf16).float()).abs().max()) > 0, "never rounded"


@DTYPES
@pytest.mark.parametrize("tokens", [7, 23])
@pytest.mark.parametrize("inner", [16, 96])
def test_nothing_is_written_behind_what_a_call_is_given(inner, tokens, dtype, monkeypatch):
    """Feed-forward parts that are narrower than the stream, too."""
    ends = []

    def guarded(rows, width, like):
        whole = torch.full((rows * width + 256,), 7.0, dtype=like.dtype)
        ends.append(whole[rows * width :])
        return whole[: rows * width].view(rows, width)

    monkeypatch.setattr(layer_halves, "_room", guarded)
    loaded = model(dtype=dtype, hidden_size=240, num_attention_heads=15, intermediate_size=inner)
    gradients(loaded, tokens)
    assert all(half._fits for half in halves_of(loaded))
    assert len(ends) > 20 and all(bool((end == 7).all()) for end in ends)


def test_frozen_weights_have_no_gradient():
    loaded = model()
    layer = loaded.model.model.layers[1]
    for p in (layer.self_attn.k_proj.weight, layer.mlp.up_proj.weight, layer.input_layernorm.weight):
        p.requires_grad_(False)
    found = gradients(loaded)
    with modules_alone():
        assert found.keys() == gradients(loaded).keys()
    loaded.model.requires_grad_(False)
    assert not hidden_of(loaded).requires_grad


@DTYPES
@pytest.mark.parametrize("parts", ["mlp", "layers"])
def test_what_runs_twice_has_the_same_bits_and_is_not_kept(parts, dtype):
    """The proof of a layer comes in its first run of two."""
    found, held = [], []
    for how in ("none", parts):
        loaded, kept = model(dtype=dtype), {}
        install_recompute(loaded.model, how)
        own = {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
        with saved_tensors_hooks(lambda x, kept=kept: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
            hidden_of(loaded)
            held.append(sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in own))
        found.append(gradients(model(dtype=dtype) if how == "none" else loaded))
        assert all(half._fits for half in halves_of(loaded))
    assert held[1] < held[0]
    assert all(torch.equal(found[0][name], x) for name, x in found[1].items())


@DTYPES
def test_where_halves_differ_the_modules_stay(dtype, monkeypatch):
    """A planted fault: gate and up in each other's place."""
    loaded, told = model(dtype=dtype), []
    for half in halves_of(loaded):
        half._fits = None
    plain = layer_halves._weights_of

    def swapped(layer):
        front, back = plain(layer)
        return front, [*back[:2], back[3], back[2], *back[4:]]

    forget = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    monkeypatch.setattr(layer_halves, "_weights_of", swapped)
    ours = hidden_of(loaded)
    forget()
    with modules_alone():
        assert torch.equal(ours, hidden_of(loaded))
    assert len(told) == len(halves_of(loaded)) and "layer 0" in told[0] and "slower" in told[0]


@pytest.mark.parametrize("change", ["a hook", "another module", "another forward pass"])
def test_layers_that_were_changed_go_through_their_modules(change):
    loaded = model()
    before = hidden_of(loaded).detach()
    layer = loaded.model.model.layers[1]
    if change == "a hook":
        layer.mlp.up_proj.register_forward_hook(lambda module, args, out: out * 2)
    elif change == "another module":
        layer.self_attn.o_proj = torch.nn.Sequential(layer.self_attn.o_proj, torch.nn.Tanh())
    elif change == "another forward pass":
        layer.mlp.down_proj.forward = lambda x: x.new_zeros(*x.shape[:-1], 80)
    ours = hidden_of(loaded).detach()
    with modules_alone():
        theirs = hidden_of(loaded).detach()
    assert not torch.equal(ours, before)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


def test_passes_that_go_through_modules():
    loaded = model()
    half, stream = halves_of(loaded)[0], torch.zeros(1, 2, 80)
    assert not half._may_fit(stream), "no layout is in force"
    with use_attention_layout(PackedLayout([PackedSegment(0, 2)])):
        assert half._may_fit(stream)
        assert not half._may_fit(stream.to(bf16)) and not half._may_fit(stream.to("meta"))
        with equal_blocks(bf16):  # ranks, whose bits are compared with these, have oneDNN's
            assert not half._may_fit(stream)
        with outside_graph():
            assert not half._may_fit(stream)
        with modules_alone():
            assert not half._may_fit(stream)


def test_a_copy_of_a_model_computes_with_its_own_weights():
    loaded = model()
    again = replace(loaded, model=copy.deepcopy(loaded.model))
    assert torch.equal(hidden_of(again), hidden_of(loaded))
    with torch.no_grad():
        for p in again.model.parameters():
            p.mul_(0.5)
    assert not torch.equal(hidden_of(again), hidden_of(loaded))
    assert halves_of(again)[0]._layer is again.model.model.layers[0]


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "lfm2"])
def test_other_families_keep_their_forward(kind):
    loaded = load_model({"random": kind, "seed": 3, **SIZE}, dtype="bfloat16")
    for module in loaded.model.modules():
        assert "LayerHalves" not in repr(module.__dict__.get("forward"))
