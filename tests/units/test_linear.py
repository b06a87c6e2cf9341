"""models/linear.py: the same numbers as torch, bits that do not depend on the batch,
and packed weights that are never stale.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from kits.engine import prompt, tiny
from kits.train import awkward_groups, batch, model, row, trainer
from rondel.models import cpu_kernels, linear, native_library, processor
from rondel.models.linear import PackedLinear, install_cpu_linear, matmul, product
from rondel.models.main_grad import stamp_of, stamps_of, weights_changed
from rondel.models.packed_layout import PackedLayout, PackedSegment

DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(1, 16), (7, 16), (2, 5, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_and_its_gradients_equal_float64(shape, with_bias):
    x, w, b = numbers(*shape), numbers(24, 16, seed=1), numbers(24, seed=2) if with_bias else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    ours = product(x, w, b)
    theirs = nn.functional.linear(exact[0], exact[1], exact[2] if with_bias else None)
    assert torch.allclose(ours.double(), theirs, atol=1e-5)
    up = numbers(*ours.shape, seed=3)
    grads, wanted = torch.autograd.grad(ours, leaves, up), torch.autograd.grad(theirs, exact, up.double())
    assert all(torch.allclose(g.double(), e, atol=1e-4) for g, e in zip(grads, wanted, strict=True))


def test_only_what_needs_a_gradient_gets_one():
    x, w = numbers(3, 16), numbers(8, 16, seed=1).requires_grad_()
    product(x, w).sum().backward()
    assert w.grad is not None and x.grad is None
    assert torch.allclose(
        matmul(numbers(4, 6), numbers(6, 5, seed=1)), numbers(4, 6) @ numbers(6, 5, seed=1), atol=1e-5
    )


@pytest.fixture
def no_bf16_products(monkeypatch) -> Iterator[None]:
    """A processor without them; what was found out about it is forgotten again, or every later test would widen."""
    known = processor.is_widened, linear._available
    monkeypatch.setattr(processor, "has_bf16_products", lambda: False)
    for answer in known:
        answer.cache_clear()
    yield
    monkeypatch.undo()
    for answer in known:
        answer.cache_clear()


@pytest.mark.usefixtures("no_bf16_products")
@pytest.mark.parametrize("shape", [(1, 16), (7, 16), (2, 5, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_without_bf16_instructions_a_bf16_product_is_the_rounded_fp32_product(shape, with_bias):
    """Forward, backward and packed: bit for bit the fp32 product of the same numbers, rounded once."""
    bf16 = torch.bfloat16
    x, w = numbers(*shape, dtype=bf16), numbers(24, 16, seed=1, dtype=bf16)
    b = numbers(24, seed=2, dtype=bf16) if with_bias else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    ours, theirs = product(x, w, b), product(wide[0], wide[1], wide[2] if with_bias else None)
    assert ours.dtype == bf16 and torch.equal(ours, theirs.to(bf16))
    up = numbers(*ours.shape, seed=3, dtype=bf16)
    grads = torch.autograd.grad(ours, leaves[:2], up)
    wanted = torch.autograd.grad(theirs, wide[:2], up.float())
    assert all(torch.equal(g, e.to(bf16)) for g, e in zip(grads, wanted, strict=True))
    stack = PackedLinear()
    with torch.no_grad():
        assert stack.can_pack(x, [w], [b] if with_bias else [])
        # in panels of 16 columns bf16 stays what it is, for oneDNN it is widened
        assert stack.packed_bytes == (32 * 16 * 2 if linear._in_panels(bf16) else 24 * 16 * 4)
        assert torch.equal(stack(x)[0], ours)


class Block(nn.Module):
    def __init__(self, bias=True, widths=(32, 16, 16)):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n, bias=bias) for n in widths)
        self.o_proj = nn.Linear(widths[0], 16, bias=bias)

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(self.q_proj(x))], -1)


def block(dtype=torch.float32, bias=True, widths=(32, 16, 16)):
    torch.manual_seed(0)
    plain = Block(bias, widths).to(dtype)
    ours = copy.deepcopy(plain)
    install_cpu_linear(ours)
    return plain, ours


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(32, 16, 16), (24, 8, 8), (40, 40, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_module_packed_or_not_gives_the_same_numbers(dtype, bias, widths):
    """Also where oneDNN's blocks of columns would not end with a weight, if several lay below each other."""
    plain, ours = block(dtype, bias, widths)
    x = numbers(5, 16, dtype=dtype)
    with torch.no_grad():
        packed, exact = ours(x), copy.deepcopy(plain).double()(x.double())
    with torch.enable_grad():
        training = ours(x)
    assert torch.equal(packed, training), "serving and training must agree in every bit"
    assert torch.allclose(packed.double(), exact, atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inside", [48, 96, 130])
def test_a_row_does_not_depend_on_its_neighbours(dtype, inside):
    x, w = numbers(90, inside, dtype=dtype), numbers(64, inside, seed=1, dtype=dtype)
    stack = PackedLinear()
    with torch.no_grad():
        if not stack.can_pack(x, [w], []):
            pytest.skip("no oneDNN products of this dtype here")
        whole = stack(x)[0]
        for first, n in ((0, 1), (5, 1), (3, 2), (40, 7), (1, 16), (13, 33), (10, 64)):
            assert torch.equal(stack(x[first : first + n].clone())[0], whole[first : first + n]), (first, n)


@pytest.mark.slow
@pytest.mark.skipif(not linear._available(torch.float32), reason="no product of oneDNN on this processor")
def test_what_few_numbers_of_rows_showed_holds_for_all():
    """A product's rows are filled up to a multiple that is measured on few: of 2 to 130 rows each has its bits."""
    x, weight = numbers(130, 48), numbers(80, 48, seed=1)
    whole = product(x, weight)
    assert [n for n in range(1, 130) if not torch.equal(product(x[:n], weight), whole[:n])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_mkl", [False, True])
def test_gradients_by_either_library(dtype, by_mkl, monkeypatch):
    """x @ w and xᵀ @ g of tokens against fp64, into an accumulator and without one, of more outputs than are taken at once."""
    monkeypatch.setattr(linear, "_is_faster_by_mkl", lambda a, b: by_mkl)
    monkeypatch.setattr(linear, "ROWS", 16)
    x, w, up = (
        numbers(2, 35, 40, dtype=dtype),
        numbers(24, 40, seed=1, dtype=dtype),
        numbers(2, 35, 24, seed=2, dtype=dtype),
    )
    leaves = [x.requires_grad_(), w.requires_grad_()]
    grads = torch.autograd.grad(product(x, w), leaves, up)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(nn.functional.linear(*exact), exact, up.double())
    step = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(grads, wanted, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=step, atol=step * float(want.abs().max()))
    main, flat = numbers(24, 40, seed=3), up.flatten(0, 1)
    summed = main + wanted[1].float()
    linear.add_product(main, flat, x.detach().flatten(0, 1))
    torch.testing.assert_close(main, summed, rtol=step, atol=step * float(summed.abs().max()))


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("outputs", [4, 96])
def test_a_weights_gradient_adds_up_many_tokens_in_short_runs(loops, outputs, monkeypatch):
    """Into an accumulator and without one, in fp32: a sum of n products, one after the other, is 2e-8 · sqrt(n) from float64,
    1.1e-6 of these 3,000, and oneDNN's of a thousand at a time 5.5e-7.
    """
    library = native_library.native_library() if loops else None
    monkeypatch.setattr(cpu_kernels, "_loaded", library)
    x, up, w = numbers(3000, 64), numbers(3000, outputs, seed=1), nn.Parameter(numbers(outputs, 64, seed=2))
    wanted = up.double().t() @ x.double()
    alone = linear.weight_gradient(w, up, x)
    main = torch.zeros(outputs, 64)
    monkeypatch.setattr(linear, "main_grad", lambda weight: main)
    assert linear.weight_gradient(w, up, x) is None
    for got in (alone, main):
        assert float((got.double() - wanted).norm() / wanted.norm()) <= 4e-7


@pytest.fixture
def panels(monkeypatch) -> Iterator[None]:
    """A processor with AVX2 alone."""
    if (library := native_library.native_library()) is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(cpu_kernels, "_loaded", library)
    monkeypatch.setattr(linear, "has_avx2_alone", lambda: True)


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("widths", "inside"), [((16, 32, 48), 40), ((37,), 1100), ((5,), 1), ((16, 3), 2050)])
def test_panels_sum_in_their_order(dtype, widths, inside):
    """One fused product after the other up to 1,024 of them, then those sums: here in fp64, each step rounded."""
    weights = [numbers(n, inside, seed=n, dtype=dtype) for n in widths]
    x, bias = numbers(9, inside), numbers(sum(widths), seed=2)
    factors, total = torch.cat(weights).double(), torch.zeros(9, sum(widths))
    for first in range(0, inside, 1024):
        part = torch.zeros_like(total)
        for k in range(first, min(inside, first + 1024)):
            part = (part.double() + x[:, k, None].double() * factors[:, k]).float()
        total = total + part
    packed = cpu_kernels.pack_panels(weights)
    ours, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ours.append(cpu_kernels.panel_product(x, packed, bias, sum(widths)))
    torch.set_num_threads(before)
    assert packed.dtype == dtype and torch.equal(*ours)
    torch.testing.assert_close(ours[0], total + bias, rtol=1e-6, atol=1e-5)
    assert (ours[0] != total + bias).float().mean() < 0.02, "another order has other bits in most numbers"


@pytest.mark.usefixtures("panels")
@pytest.mark.parametrize("inside", [576, 1536])
def test_a_row_of_panels_has_the_same_bits_in_every_company(inside):
    x, w = numbers(230, inside), numbers(50, inside, seed=1)
    packed = cpu_kernels.pack_panels([w])
    whole = cpu_kernels.panel_product(x, packed, None, 50)
    torch.testing.assert_close(whole, x @ w.t(), rtol=1e-4, atol=1e-4)
    for first, rows in [(3, n) for n in range(1, 20)] + [(0, 96), (90, 97), (7, 193)]:
        assert torch.equal(
            cpu_kernels.panel_product(x[first : first + rows], packed, None, 50), whole[first : first + rows]
        )
    half = cpu_kernels.pack_panels([w.bfloat16()])
    rounded = cpu_kernels.panel_product(x, cpu_kernels.pack_panels([w.bfloat16().float()]), None, 50)
    for rows in (1, 7, 12, 13, 97, 230):  # widened in registers or before
        assert torch.equal(cpu_kernels.panel_product(x[:rows], half, None, 50), rounded[:rows])
    assert cpu_kernels.panel_product(x[:0], packed, None, 50).shape == (0, 50)


@pytest.mark.usefixtures("panels", "no_bf16_products")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_packed_in_panels_has_the_bits_of_training(dtype, with_bias, monkeypatch):
    if not cpu_kernels.has_panels():
        pytest.skip("this version of oneDNN sums in another order")
    weights = [numbers(n, 1100, seed=n, dtype=dtype) for n in (48, 16, 21)]
    biases = [numbers(len(w), seed=9 + len(w), dtype=dtype) for w in weights] if with_bias else []
    x, stack, parts = numbers(130, 1100, dtype=dtype), PackedLinear(), [PackedLinear(), PackedLinear(), PackedLinear()]
    with torch.no_grad():
        assert not stack.can_pack(x, weights, biases), "a width that is no multiple of 16"
        for rows in (1, 2, 6, 130):
            for i, (w, part) in enumerate(zip(weights, parts, strict=True)):
                assert part.can_pack(x, [w], biases[i : i + 1])
                assert torch.equal(part(x[:rows])[0], product(x, w, biases[i] if biases else None)[:rows])
        assert parts[0].packed_bytes == 48 * 1100 * (2 if dtype == torch.bfloat16 else 4)
        monkeypatch.setattr(cpu_kernels, "_loaded", None)
        assert parts[0].can_pack(x, weights[:1], biases[:1]), "packed again for what computes now"
        assert torch.equal(parts[0](x)[0], product(x, weights[0], biases[0] if biases else None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_pass_may_go_without_packing(dtype):
    x, w = numbers(7, 32, dtype=dtype), numbers(48, 32, seed=1, dtype=dtype)
    stack = PackedLinear()
    with torch.no_grad():
        with linear.without_packing():
            assert not stack.can_pack(x, [w], []) and stack.packed_bytes == 0
        assert stack.can_pack(x, [w], [])
        with linear.without_packing():
            assert stack.can_pack(x, [w], []), "what is packed is used"
            w.mul_(2)
            assert not stack.can_pack(x, [w], []), "and not when it is stale"
            plain = product(x, w)
        assert stack.can_pack(x, [w], []) and torch.equal(stack(x)[0], plain)


def changes(module):
    yield "in place", lambda: module.q_proj.weight.mul_(2)
    yield "an optimizer", lambda: step(module)
    yield "a fused optimizer", lambda: (step(module, torch.optim.AdamW, fused=True), weights_changed())
    yield "load_state_dict", lambda: module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    yield (
        "another tensor behind the parameter",
        lambda: setattr(module.k_proj.weight, "data", module.k_proj.weight.data * 3),
    )
    yield "another parameter", lambda: setattr(module.v_proj, "weight", nn.Parameter(module.v_proj.weight.detach() - 1))
    yield "a bias", lambda: module.v_proj.bias.add_(1)
    yield "written past torch", lambda: (past_torch(module.o_proj.weight), weights_changed())


def step(module, kind=torch.optim.SGD, **how):
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    kind(module.parameters(), lr=0.1, **how).step()


def past_torch(weight):
    weight.detach().numpy()[:] += 1


@pytest.mark.parametrize("what", range(8))
def test_no_packed_weight_is_ever_stale(what):
    plain, ours = block()
    x = numbers(4, 16)
    with torch.no_grad():
        before = ours(x)
        name, change = list(changes(ours))[what]
        change()
        plain.load_state_dict(ours.state_dict())
        assert not torch.equal(ours(x), before), name
        assert torch.allclose(ours(x), plain(x), atol=1e-5), name


def test_a_copy_of_a_module_has_its_own_weights():
    _, ours = block()
    x = numbers(4, 16)
    with torch.no_grad():
        first = ours(x)
        twin = copy.deepcopy(ours)
        for p in twin.parameters():
            p.mul_(0.5)
        assert torch.equal(ours(x), first) and not torch.equal(twin(x), first)


def test_a_whole_model_serves_the_bits_it_trains_with():
    loaded = tiny("llama")
    tokens = torch.tensor(prompt(3, 20))
    where, layout = torch.arange(20), PackedLayout([PackedSegment(0, 20)])
    with torch.no_grad():
        serving = loaded.hidden_states(tokens, where, layout)
    training = loaded.hidden_states(tokens, where, layout)
    assert training.requires_grad and torch.equal(serving, training)


def test_without_the_memory_nothing_is_packed_and_nothing_changes(monkeypatch):
    plain, ours = block()
    x = numbers(4, 16)
    with torch.no_grad():
        packed = ours(x)
        _, poor = block()
        monkeypatch.setattr(linear, "SPARE", 1 << 60)
        assert torch.equal(poor(x), packed)
        monkeypatch.setattr(linear, "_available", lambda dtype: False)
        _, elsewhere = block()
        assert torch.equal(elsewhere(x), plain(x))


def test_the_trainers_step_is_seen(monkeypatch):
    """torch's fused AdamW leaves the version counters alone: without a word from the
    trainer old weights would go on serving.
    """
    t = trainer(model("llama", "float32"))
    x = numbers(3, t.loaded.head.weight.shape[1])
    with torch.no_grad():
        before = t.loaded.head.logits(x)
    for p in t.weights.masters:
        p.grad = torch.ones_like(p)
    t.weights.step(lr=0.1, clip=1e9, norm=t.weights.gradient_norm())
    with torch.no_grad():
        after = t.loaded.head.logits(x)
        assert not torch.equal(after, before) and torch.allclose(after, x @ t.loaded.head.weight.t(), atol=1e-4)


def test_packed_copies_are_not_held_while_gradients_are_and_none_of_the_reference_ever():
    """A packed copy is as large as the model: the engine's is stale after the step anyway,
    and the reference reads a few samples a step.
    """
    algo = row("dr_grpo")
    t = trainer(model("llama"), algo, start_probe=4)
    groups = batch(awkward_groups(), algo)
    held = []
    accumulate = t._accumulate_gradients

    def watched(*args, **kwargs):
        held.append(sum(stack.packed_bytes for stack in linear.packed_linears(t.loaded.model)))
        return accumulate(*args, **kwargs)

    t._accumulate_gradients = watched
    with torch.no_grad():
        t.loaded.hidden_states(
            torch.arange(5, 9), torch.arange(4), PackedLayout([PackedSegment(0, 4)])
        )  # as the engine does
    assert sum(stack.packed_bytes for stack in linear.packed_linears(t.loaded.model)) > 0
    t._step(groups, algo)
    assert held == [0]
    assert t.start is not None and sum(stack.packed_bytes for stack in linear.packed_linears(t.start.model)) == 0


def test_stamps_of_all_change_where_the_stamp_of_one_does():
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    frozen = [torch.ones(4), torch.nn.Parameter(torch.ones(4), requires_grad=False)]
    for change, alike in (
        (lambda w: w[1].detach().mul_(2), False),
        (lambda w: setattr(w[2], "data", torch.ones(4)), False),
        (lambda w: None, True),
    ):
        for group in (weights, [*weights, *frozen]):
            before, each = stamps_of(group), [stamp_of(w) for w in group]
            change(group)
            assert (stamps_of(group) == before) == ([stamp_of(w) for w in group] == each) == alike
    for group, alike in ((weights, False), ([*frozen, weights[0]], False), (frozen, True)):
        before, each = stamps_of(group), [stamp_of(w) for w in group]
        weights_changed()
        assert (stamps_of(group) == before) == ([stamp_of(w) for w in group] == each) == alike
