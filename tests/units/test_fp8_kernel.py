"""formats/fp8_kernel.py: Triton's interpreter gives the bits of formats/fp8.py and moves a weight once. On a GPU the same
tests run on the card."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kits.kernels import bfloat16_interpreter, moved_bytes
from rondel.core.errors import ModelError
from rondel.formats import FORMATS, fp8
from rondel.formats.fp8 import Fp8
from rondel.system.kernel_choice import KernelChoice

pytest.importorskip("triton", reason="pip install triton")
from rondel.formats.fp8_kernel import decode_blocks, encode_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def weight(shape=(130, 200), seed: int = 0) -> torch.Tensor:
    """Numbers of many sizes: each code of E4M3 many times, ties between codes, both zeros, a block of zeros."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-18, 3, shape, generator=g))
    w[..., ::3] = torch.randint(-448, 449, w[..., ::3].shape, generator=g) / 64.0
    w[..., 1, :], w[..., 0, :7] = -0.0, 448 / 64
    return w.to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture
def plain(monkeypatch):
    """What no kernel computes, on a GPU either."""
    monkeypatch.setattr(fp8, "choose_kernel", lambda *given: KernelChoice(False, "compared"))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("shape", [(130, 200), (128, 128), (3, 33), (2, 40, 72), (0, 5)], ids=str)
def test_codes_scales_and_numbers_are_bit_for_bit_those_of_the_plain_code(plain, rows, shape):
    form = Fp8((rows, 128))
    for dtype in FLOATS:
        w = (weight(shape) if 0 not in shape else torch.zeros(shape, device=DEVICE)).to(dtype)
        wanted = form.encode(w)
        with bfloat16_interpreter():
            codes, scale = encode_blocks(w, rows)
            assert torch.equal(bits(codes), bits(wanted["weight"]))
            assert torch.equal(bits(scale), bits(wanted["weight_scale_inv"]))
            decoded = decode_blocks(codes, scale, rows, dtype)
        assert torch.equal(bits(decoded), bits(form.decode(wanted, dtype)))


def test_every_code_is_decoded_and_found_again(plain):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128)
    scale = torch.tensor([[1.0], [2.0**-7]], device=DEVICE)
    decoded = decode_blocks(codes.view(torch.float8_e4m3fn), scale, 1, torch.float32)
    wanted = Fp8((1, 128)).decode({"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scale})
    assert torch.equal(decoded.isnan(), wanted.isnan()) and torch.equal(
        bits(decoded.nan_to_num()), bits(wanted.nan_to_num())
    )
    again, same_scale = encode_blocks(decoded.nan_to_num(), 1)
    assert torch.equal(bits(again)[:, :127], codes[:, :127]) and torch.equal(same_scale, scale)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize("rows", [1, 128])
def test_a_weight_is_read_once_and_written_once(rows):
    w, form = weight().bfloat16(), Fp8((rows, 128))
    expected = w.nbytes + form.stored_bytes(w.shape)
    with moved_bytes() as moved:
        codes, scale = encode_blocks(w, rows)
    assert moved.total() == expected
    with moved_bytes() as moved:
        decode_blocks(codes, scale, rows, torch.bfloat16)
    assert moved.total() == expected


def test_which_code_computes_it_and_why(monkeypatch):
    w = weight()
    if DEVICE == "cpu":
        assert Fp8().choose_kernel(w, w.dtype).reason == "the tensors are on cpu, and kernels are for cuda"
    monkeypatch.setattr(fp8, "choose_kernel", lambda device, *unsupported: unsupported)
    assert Fp8().choose_kernel(w, torch.bfloat16) == Fp8((1, 128)).choose_kernel(w, torch.float32) == ()
    assert Fp8((1, 0)).choose_kernel(w, torch.float64) == ("blocks of 1 × 0", "torch.float64")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of inf / inf
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_format_takes_the_kernel_and_still_refuses_what_is_not_finite(monkeypatch, bad):
    w, form = weight((40, 64)), Fp8()
    wanted = form.encode(w)
    monkeypatch.setattr(fp8, "choose_kernel", lambda *given: KernelChoice(True))
    parts = form.encode(w)
    assert parts.keys() == wanted.keys() and torch.equal(bits(parts["weight"]), bits(wanted["weight"]))
    assert torch.equal(form.decode(parts), form.fake(w))
    w[3, 5] = bad
    with pytest.raises(ModelError, match=r"not finite.*trainer\.lr"):
        form.encode(w)


class Divisors(TorchDispatchMode):
    """Notes divisions by a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.of_host: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            self.of_host.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_divides_by_a_number_of_the_host(name):
    """CUDA multiplies by its reciprocal instead, which is rounded twice: a second encoding would find other scales."""
    w = weight().cpu()
    with Divisors() as found:
        w / 3.0
        assert found.of_host.pop() == 3.0
        FORMATS[name].encode(w)
    assert found.of_host == []
