"""Layers of a decode step in one call: the products of pairs against float64, the pass against the modules, and the
passes that go through these.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest
import torch

from kits.engine import SIZE, all_of, ask, engine, prompt
from kits.pairs import use_pairs
from rondel.core.events import Warned, subscribe
from rondel.models import cpu_kernels, packed_layers
from rondel.models.cache_pools import LayerPools
from rondel.models.head import LMHead
from rondel.models.linear import packed_linears
from rondel.models.load import load_model
from rondel.models.main_grad import weights_changed
from rondel.models.packed_layers import PackedLayers
from rondel.models.paged_layout import DecodeBatch, PagedLayout, PrefillChunk

bf16, fp32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"head_dim": 32},
}


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    use_pairs(monkeypatch)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(bf16)


@pytest.mark.parametrize("widths", [(48, 16, 32), (37,), (16,)])
@pytest.mark.parametrize("inside", [2, 66, 1040])
def test_products_of_pairs(widths, inside):
    weights, x = [numbers(n, inside, seed=n) for n in widths], numbers(29, inside)
    packed = cpu_kernels.pack_words(weights)
    for bias in (None, torch.linspace(-1, 1, sum(widths))):
        out = cpu_kernels.pair_product(x, packed, bias, sum(widths))
        wanted = x.double() @ torch.cat(weights).double().t() + (0 if bias is None else bias)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=2e-6 * inside)
        for rows in range(1, 29):
            some = cpu_kernels.pair_product(x[3 : 3 + rows], packed, bias, sum(widths))
            assert torch.equal(some, out[3 : 3 + rows]), "a row has its bits in every company"
    assert cpu_kernels.pair_product(x[:0], packed, None, sum(widths)).shape == (0, sum(widths))


@pytest.mark.parametrize("widths", [(48, 16, 32), (37,), (16, 16)])
def test_packed_into_a_room_they_are_what_they_are_alone(widths):
    weights = [numbers(n, 66, seed=n) for n in widths]
    room = torch.full((cpu_kernels.packed_size(weights),), float("nan"), dtype=bf16)
    packed = cpu_kernels.pack_words(weights, room=room)
    assert packed.data_ptr() == room.data_ptr() and torch.equal(packed, cpu_kernels.pack_words(weights))
    if sum(widths) % 32:
        assert not room.view(len(packed), -1, 32, 2)[-1, :, sum(widths) % 32 :].any()


@pytest.mark.parametrize("inside", [512, 513, 1024, 2048])
def test_rows_lie_apart_in_a_first_cache(inside):
    rooms = [cpu_kernels.row_room(3, inside, dtype) for dtype in (bf16, torch.float32)]
    assert all(room.shape == (3, inside) and room.stride(0) * room.itemsize % 1024 for room in rooms)
    x = numbers(5, inside)
    apart = cpu_kernels.apart(x)
    assert torch.equal(apart, x) and (apart is x) == (inside * 2 % 1024 > 0)
    assert cpu_kernels.apart(apart) is apart and cpu_kernels.apart(x[:, ::2]).stride(1) == 1


def test_more_rows_than_one_reading_of_the_weights_takes():
    x, w = numbers(450, 64), numbers(80, 64, seed=1)
    whole = cpu_kernels.pair_product(x, cpu_kernels.pack_words([w]), None, 80)
    torch.testing.assert_close(whole, x.float() @ w.float().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "outputs", "inside"), [(1, 5, 3), (37, 50, 66), (1100, 24, 32)])
def test_a_weights_gradient_is_added_to_its_sum(rows, outputs, inside, dtype):
    """Of some columns of a gradient, whose rows lie apart."""
    grad, x = (numbers(*shape).to(dtype) for shape in ((rows, outputs + 7), (rows, inside)))
    main = numbers(outputs, inside).float()
    wanted = main.double() + grad[:, 4 : 4 + outputs].double().t() @ x.double()
    cpu_kernels.add_weight_gradient(main, grad[:, 4 : 4 + outputs], x)
    torch.testing.assert_close(main.double(), wanted, rtol=1e-5, atol=3e-6 * rows**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, bf16], ids=["fp32", "bf16"])
def test_a_weights_gradient_has_the_same_bits_however_many_threads_share_it(dtype):
    grad, x, before = numbers(600, 300).to(dtype), numbers(600, 66, seed=1).to(dtype), torch.get_num_threads()
    found = [torch.zeros(300, 66) for _ in range(4)]
    for main, threads in zip(found, (1, 2, 3, 8)):
        torch.set_num_threads(threads)
        cpu_kernels.add_weight_gradient(main, grad, x)
    torch.set_num_threads(before)
    assert found[0].any() and all(torch.equal(found[0], other) for other in found[1:])


def test_two_weights_packed_in_turns():
    gate, up, x = numbers(48, 32, seed=1), numbers(48, 32, seed=2), numbers(5, 32)
    out = cpu_kernels.pair_product(x, cpu_kernels.pack_words([gate, up], in_turns=True), None, 96)
    halves = out.view(5, 3, 2, 16)
    for i, w in enumerate((gate, up)):
        torch.testing.assert_close(halves[:, :, i].reshape(5, 48), x.float() @ w.float().t(), rtol=1e-4, atol=1e-4)


def model(kind, dtype=bf16, **config):
    """Random weights, three times as large as they begin, and the same in float64."""
    config = SIZE | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | FAMILIES[kind] | config
    loaded = load_model({"random": kind, "seed": 3, **config}, dtype=str(dtype).removeprefix("torch."))
    with torch.no_grad():
        for i, p in enumerate(loaded.model.parameters()):
            p.mul_(3) if p.dim() > 1 else p.add_(torch.linspace(-0.4, 0.4, len(p)).mul(1 - i % 3).to(dtype))
    exact = copy.deepcopy(loaded.model).double()
    exact.get_input_embeddings().fp32_stream = False
    return loaded, replace(loaded, model=exact, head=LMHead.from_model(exact))


def steps_of(pools):
    """Two families of three siblings behind a common prompt, and a step of prompts beside requests that decode."""
    n, slots = 21, torch.arange(100)
    token = (torch.arange(100) * 7 + 3) % 50
    prompts = [slots[:n], slots[n : 2 * n]]
    chunks = [PrefillChunk(0, n, prompts[0]), PrefillChunk(n, n, prompts[1])]
    write = torch.cat(prompts)
    yield token[write], torch.arange(n).repeat(2), PagedLayout(*pools, write, chunks)
    own = slots[42:48]
    place = torch.arange(6)
    grid = place.view(2, 3)
    batch = DecodeBatch(
        own[:, None], torch.ones(6, dtype=torch.long), torch.stack(prompts), torch.tensor([n, n]), grid, place
    )
    yield token[own], torch.full((6,), n), PagedLayout(*pools, own, [], batch)
    fresh, after = slots[60:71], slots[50:52]
    own = torch.stack(
        [torch.cat([prompts[0], slots[42:43], after[:1]]), torch.cat([prompts[1], slots[45:46], after[1:]])]
    )
    write = torch.cat([fresh, after])
    layout = PagedLayout(*pools, write, [PrefillChunk(0, 11, fresh)], DecodeBatch(own, torch.tensor([n + 2] * 2)))
    yield token[write], torch.cat([torch.arange(11), torch.tensor([n + 1] * 2)]), layout


def logprobs(loaded, hidden_states, pages=100):
    found = []
    with torch.inference_mode():
        for tokens, positions, layout in steps_of((LayerPools(pages), LayerPools(pages))):
            found.append(loaded.head.logits(hidden_states(tokens, positions, layout)).double().log_softmax(-1))
    return torch.cat(found)


@DTYPES
@pytest.mark.parametrize("kind", [*FAMILIES, "wide"])
def test_the_pass_is_that_of_the_modules(kind, dtype):
    wide = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024, "num_hidden_layers": 1}
    loaded, exact = model("llama", dtype, **wide) if kind == "wide" else model(kind, dtype)
    layers = PackedLayers(loaded)
    ours, theirs = logprobs(loaded, layers.hidden_states), logprobs(loaded, loaded.hidden_states)
    assert layers._fits and layers.packed_bytes > 0
    truth = logprobs(exact, exact.hidden_states)
    off, usual = (ours - truth).abs().mean(), (theirs - truth).abs().mean()
    assert 0 < off < (1.2 * usual if dtype == bf16 else max(1e-6, 1.2 * usual)), (off, usual)
    assert (ours - theirs).abs().mean() < (1.5 * usual if dtype == bf16 else max(1e-6, usual))


@DTYPES
def test_bits_do_not_depend_on_threads_or_company(dtype):
    loaded, _ = model("llama", dtype)
    layers, before = PackedLayers(loaded), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(logprobs(loaded, layers.hidden_states))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    pools = LayerPools(100), LayerPools(100)
    with torch.inference_mode():
        steps = list(steps_of(pools))
        layers.hidden_states(*steps[0])
        tokens, positions, layout = steps[1]
        whole = layers.hidden_states(tokens, positions, layout)
        for row in range(6):
            own = torch.cat([layout.decoding.prefix[row // 3], layout.decoding.own[row]])[None]
            alone = PagedLayout(*pools, layout.write[row : row + 1], [], DecodeBatch(own, torch.tensor([22])))
            assert torch.equal(
                layers.hidden_states(tokens[row : row + 1], positions[row : row + 1], alone)[0], whole[row]
            )


def test_new_weights_are_packed_before_the_next_pass():
    loaded, _ = model("qwen3")
    layers = PackedLayers(loaded)
    first = logprobs(loaded, layers.hidden_states)
    held = layers.packed_bytes
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.q_norm.weight.mul_(0.5)
    second = logprobs(loaded, layers.hidden_states)
    assert not torch.equal(first, second)
    loaded.model.model.layers[0].mlp.up_proj.weight.detach().view(torch.int16).numpy()[0] ^= 1  # past torch's counters
    weights_changed()
    third = logprobs(loaded, layers.hidden_states)
    assert not torch.equal(second, third)
    for copies in packed_linears(loaded.model):
        copies.drop_packed()
    assert layers.packed_bytes == 0
    assert torch.equal(logprobs(loaded, layers.hidden_states), third) and layers.packed_bytes == held


@pytest.mark.slow
def test_a_model_that_was_changed_goes_through_its_modules():
    for change in ("another parameter", "another module", "another layer", "another last norm", "rounded"):
        loaded, _ = model("llama")
        layers = PackedLayers(loaded)
        before = logprobs(loaded, layers.hidden_states)
        attention = loaded.model.model.layers[1].self_attn
        if change == "another parameter":
            attention.v_proj.weight = torch.nn.Parameter(attention.v_proj.weight.detach() * 0.5)
            packed = logprobs(loaded, layers.hidden_states)
            assert not torch.equal(packed, before), change
            torch.testing.assert_close(packed, logprobs(loaded, loaded.hidden_states), rtol=0, atol=0.05)
            continue
        if change == "another module":
            attention.o_proj = torch.nn.Sequential(attention.o_proj, torch.nn.Identity())
        elif change == "another layer":
            loaded.model.model.layers[1] = copy.deepcopy(loaded.model.model.layers[0])
        elif change == "another last norm":
            loaded.model.model.norm = copy.deepcopy(loaded.model.model.layers[0].input_layernorm)
        else:
            loaded.round_sums()
        assert torch.equal(logprobs(loaded, layers.hidden_states), logprobs(loaded, loaded.hidden_states)), change


@DTYPES
def test_where_the_one_call_differs_the_modules_stay(dtype, monkeypatch):
    """A planted fault: norms of the second half of a layer that read the first one's weight."""
    loaded, _ = model("llama", dtype)
    told = []
    forget = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    plain = packed_layers._packed_parts

    def with_the_first_norm_twice(layer, rooms):
        parts = plain(layer, rooms)
        return [*parts[:7], parts[0], *parts[8:]]

    monkeypatch.setattr(packed_layers, "_packed_parts", with_the_first_norm_twice)
    layers = PackedLayers(loaded)
    ours = logprobs(loaded, layers.hidden_states)
    forget()
    assert torch.equal(ours, logprobs(loaded, loaded.hidden_states))
    assert layers._fits is False and len(told) == 1 and "gives something else" in told[0] and "slower" in told[0]


def test_where_the_last_norm_differs_the_modules_stay():
    loaded, _ = model("llama")
    loaded.model.model.norm.register_forward_hook(lambda _, __, out: 2 * out)
    layers = PackedLayers(loaded)
    assert torch.equal(logprobs(loaded, layers.hidden_states), logprobs(loaded, loaded.hidden_states))
    assert layers._fits is False


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "qwen3_moe", "lfm2"])
def test_other_families_go_through_their_modules(kind):
    loaded = load_model({"random": kind, "seed": 3, **SIZE}, dtype="bfloat16")
    assert packed_layers.serving_pass_of(loaded) == loaded.hidden_states


def test_float16_and_aligned_numerics_go_through_modules():
    for dtype, changes in (
        ("float16", {}),
        ("float32", {"aligned": True}),
        ("bfloat16", {"aligned": True}),
        ("bfloat16", {"routers": 1}),
    ):
        loaded = load_model({"random": "llama", "seed": 3, **SIZE}, dtype=dtype)
        assert not PackedLayers(replace(loaded, **changes)).may_fit


def test_a_copy_of_the_model_has_no_packed_layers():
    loaded, _ = model("llama")
    layers = PackedLayers(loaded)
    logprobs(loaded, layers.hidden_states)
    again = copy.deepcopy(loaded.model)
    assert again.packed_layers is None and not any(copies.packed_bytes for copies in packed_linears(again))


@DTYPES
def test_an_engine_tells_what_a_scoring_pass_tells(dtype):
    """Whole requests, prompts and siblings among them, through the engine that takes this pass by itself."""
    loaded, _ = model("llama", dtype)
    e = engine(loaded)
    found = asyncio.run(
        all_of(e, [ask(prompt(g, 12 + 9 * g), key=10 * g + s, n=8) for g in range(2) for s in range(3)])
    )
    assert loaded.model.packed_layers._fits
    for g, answer in enumerate(found):
        given = prompt(g // 3, 12 + 9 * (g // 3))
        scored = e.runner.score([*given, *answer.tokens])[len(given) :]
        assert answer.logprobs == pytest.approx(scored, abs=0.06 if dtype == bf16 else 1e-5)
