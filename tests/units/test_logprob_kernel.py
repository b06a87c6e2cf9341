"""models/logprob_kernel.py: Triton's interpreter computes what train/logprobs.py does, values and gradients, and moves the
bytes of the formula. On a GPU the same tests run on the card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kits.kernels import bfloat16_interpreter, moved_bytes
from kits.processor import rows_alike
from kits.sweeps import covering
from rondel.models.head import LMHead
from rondel.models.linear import as_factor
from rondel.system import kernel_choice
from rondel.system.kernel_choice import KernelChoice
from rondel.train import logprobs
from rondel.train.logprobs import choose_logprob_kernel, fused_logprob_and_entropy, logprob_and_entropy

pytest.importorskip("triton", reason="pip install triton")
from rondel.models import logprob_kernel
from rondel.models.logprob_kernel import LogitShape, TileShape, bytes_moved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, V, D = 21, 301, 20
TILE = TileShape(
    16, 128, 16
)  # nothing is a multiple: of tokens, of the vocabulary (whose splits 3 to 7 are empty), of D
HEADS = {"plain": {}, "all": {"bias": True, "softcap": 4.0, "scale": 1.7}}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def setup(how: str = "plain", dtype: torch.dtype = torch.float32, tokens: int = T):
    torch.manual_seed(0)
    settings = dict(HEADS[how])
    bias = nn.Parameter(torch.randn(V, device=DEVICE).to(dtype)) if settings.pop("bias", False) else None
    head = LMHead(nn.Parameter((torch.randn(V, D, device=DEVICE) * 0.7).to(dtype)), bias, **settings)
    hidden = torch.randn(tokens, D, device=DEVICE).to(dtype).requires_grad_()
    return hidden, torch.randint(0, V, (tokens,), device=DEVICE), head


def fused(hidden, target, head: LMHead, temperature: float = 1.0, tile: TileShape = TILE):
    shape = LogitShape(head.scale, head.softcap, temperature)
    return fused_logprob_and_entropy(as_factor(hidden, head.weight), head.weight, head.bias, target, shape, tile=tile)


def gradients(out, up, leaves):
    return torch.autograd.grad(sum((u * x).sum() for u, x in zip(up, out) if u is not None), leaves)


def near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert (ours - theirs).norm() <= tolerance * theirs.norm(), ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("how, dtype", [*((how, torch.float32) for how in HEADS), *(("all", d) for d in FLOATS[1:])])
def test_the_kernel_computes_what_the_plain_code_does(how, dtype):
    hidden, target, head = setup(how, dtype)
    leaves = [x for x in (hidden, head.weight, head.bias) if x is not None]
    up = torch.randn(2, T, device=DEVICE)
    plain = logprob_and_entropy(hidden, target, head, temperature=0.6)
    with bfloat16_interpreter():
        ours = fused(hidden, target, head, 0.6)
        assert all(x.dtype == torch.float32 for x in ours)
        for a, b in zip(ours, plain, strict=True):  # the plain code on a CPU has 16 of 24 bits (models/linear.py)
            torch.testing.assert_close(a, b, atol=1e-5 if dtype == torch.float32 else 1e-3, rtol=1e-5)
        tolerance = {torch.float32: 2e-6 if DEVICE == "cpu" else 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        for some in ((up[0], up[1]), (up[0], None), (None, up[1]))[
            : 3 if (how, dtype) == ("all", torch.float32) else 1
        ]:
            wanted = torch.autograd.grad(
                sum((u * x).sum() for u, x in zip(some, plain) if u is not None), leaves, retain_graph=True
            )
            for a, b in zip(gradients(fused(hidden, target, head, 0.6), some, leaves), wanted, strict=True):
                near(a, b, tolerance)


@pytest.mark.slow
def test_states_of_float32_meet_a_head_of_16_bits_as_in_the_plain_code():
    hidden, target, head = setup("plain", torch.float16)
    hidden = hidden.detach().float().requires_grad_()
    leaves = [hidden, head.weight]
    plain, ours = logprob_and_entropy(hidden, target, head), fused(hidden, target, head)
    for a, b in zip(gradients(ours, (1.0, None), leaves), gradients(plain, (1.0, None), leaves)):
        near(a, b, 1e-3)


def test_no_tokens_one_token_and_a_frozen_head():
    hidden, target, head = setup(tokens=0)
    out = fused(hidden, target, head)
    dhidden, dweight = gradients(out, (1.0, 1.0), [hidden, head.weight])
    assert out[0].shape == out[1].shape == (0,) and dhidden.shape == (0, D) and not dweight.any()
    hidden, target, head = setup(tokens=1)
    head.weight.requires_grad_(False)
    ours, plain = fused(hidden, target, head), logprob_and_entropy(hidden, target, head)
    near(gradients(ours, (1.0, 1.0), [hidden])[0], gradients(plain, (1.0, 1.0), [hidden])[0], 2e-6)


def test_extreme_logits_stay_finite_and_a_wrong_id_is_not_a_number():
    hidden, target, head = setup(tokens=4)
    target[1], target[2] = -1, V
    big = (hidden.detach() * 1e4).requires_grad_()
    logprob, entropy = fused(big, target, head)
    assert logprob.isnan().tolist() == [False, True, True, False] and (entropy >= 0).all()
    assert all(g.isfinite().all() for g in gradients((logprob[::3], entropy), (1.0, 1.0), [big, head.weight]))


@pytest.mark.slow
def test_a_token_has_the_same_bits_in_every_batch():
    hidden, target, head = setup("all")
    whole = fused(hidden, target, head)
    for rows in (slice(0, 1), slice(3, 20)):
        pairs = [*zip(fused(hidden[rows], target[rows], head), (b[rows] for b in whole))]
        if rows_alike():
            assert all(torch.equal(a, b) for a, b in pairs)
        else:  # the interpreter's tiles are products of numpy's, whose bits are a matter of the place in a tile there
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that torch made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor) and made.dtype != torch.uint8:  # bytes, as which the interpreter copies
                self.numbers = max(self.numbers, made.numel())
        return out


@pytest.mark.slow
def test_logits_exist_as_tiles_and_chunks(monkeypatch):
    """As tiles in the forward pass, five tokens at a time in the backward pass, which changes next to nothing."""
    hidden, target, head = setup()
    whole = gradients(fused(hidden, target, head), (1.0, 1.0), [hidden, head.weight])
    monkeypatch.setattr(logprobs, "GPU_LOGITS", 5 * V)
    with Largest() as seen:
        chunks = gradients(fused(hidden, target, head), (1.0, 1.0), [hidden, head.weight])
    for a, b in zip(chunks, whole, strict=True):
        near(a, b, 1e-6)
    assert seen.numbers == V * D < T * V  # the gradient of the head


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize("dtype", covering(FLOATS[:2], [torch.float16]))  # whose bytes are not those of the sums
def test_bytes_moved_are_those_of_the_formula(dtype, monkeypatch):
    hidden, target, head = setup("plain", dtype)
    monkeypatch.setattr(logprob_kernel, "COLUMNS", 64)
    forward, dz = bytes_moved(T, V, D, hidden.element_size(), TILE)
    with moved_bytes() as moved:
        out = fused(hidden, target, head)
    assert moved.total() == forward
    with moved_bytes() as moved:
        gradients(out, (1.0, 1.0), [hidden, head.weight])
    assert moved.total() == dz


def test_a_large_tile_where_its_memory_is():
    of = logprob_kernel.tile_of
    assert of(2, 227 << 10) == logprob_kernel.LARGE and of(2, 99 << 10) == logprob_kernel.SMALL == TileShape()
    assert of(4, 227 << 10) == of(4, 0) == logprob_kernel.FULL


@pytest.fixture
def installed(monkeypatch):
    """Packages that are found from here on."""
    found = {"triton"}
    monkeypatch.setattr(kernel_choice.importlib.util, "find_spec", lambda name: name if name in found else None)
    kernel_choice.choose_kernel.cache_clear()
    yield found
    kernel_choice.choose_kernel.cache_clear()


def test_which_code_computes_it_and_why(installed):
    hidden, _, head = setup("all", torch.bfloat16)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert choose_logprob_kernel(on_gpu, head) == KernelChoice(True)
    if DEVICE == "cpu":
        assert choose_logprob_kernel(hidden, head).reason == "the tensors are on cpu, and kernels are for cuda"

    def why(kept=None, hidden=on_gpu, **settings):
        choice = choose_logprob_kernel(hidden, LMHead(settings.pop("weight", head.weight), **settings), kept)
        assert not choice.takes_kernel
        return choice.reason.removeprefix("the kernel does not compute ")

    assert why(kept=object()) == "truncated support"
    assert why(part=object(), aligned=True) == "a part of the vocabulary, aligned numerics"
    assert why(rounded=True) == "rounded logits"
    wide = head.weight.detach().double().as_subclass(type("Sharded", (torch.Tensor,), {}))
    assert why(weight=wide).startswith("a head that is a Sharded, hidden states of torch.float32 under a head of")
    half = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    assert why(hidden=half) == "hidden states of torch.float16 under a head of torch.bfloat16"
    installed.clear()
    kernel_choice.choose_kernel.cache_clear()
    assert why() == "Triton is not installed (pip install triton)"


def test_the_trainer_takes_the_kernel_where_it_is_chosen(monkeypatch):
    hidden, target, head = setup("all")
    wanted = logprob_and_entropy(hidden, target, head, temperature=0.6)
    monkeypatch.setattr(logprobs, "choose_logprob_kernel", lambda *given: KernelChoice(True))
    ours = logprob_and_entropy(hidden, target, head, temperature=0.6)
    assert type(ours[0].grad_fn).__name__ == "_FusedBackward"
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
