"""Number formats: what is decoded is what is faked, a second encoding changes nothing, and the codes are those of a table or of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondel.core.errors import ConfigError, ModelError
from rondel.formats import FORMATS, format_of
from rondel.formats.blocks import to_e4m3
from rondel.formats.fold import fold_to_fp8
from rondel.formats.fp4 import VALUES, Mxfp4, from_e2m1, pack_pairs, to_e2m1, unpack_pairs
from rondel.formats.fp8 import Fp8, widen_codes
from rondel.formats.int4 import pack_nibbles, unpack_nibbles

# -> the largest relative error of a matrix of normal numbers, and bits a weight of a large one
BOUNDS = {
    "fp8": (0.03, 8.01), "fp8_row": (0.03, 8.1), "fp8_tensor": (0.03, 8.01), "mxfp8": (0.04, 8.3),
    "int4": (0.11, 4.6), "int4_128": (0.13, 4.2), "mxfp4": (0.16, 4.3), "nvfp4": (0.12, 4.6),
}  # fmt: skip
SHAPES = [(256, 256), (130, 200), (3, 33), (1, 1), (2, 40, 72)]  # whole blocks, ragged ones, experts


def weight(shape=(256, 256), seed=0, scale=0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x.view(torch.uint8), b[k].view(torch.uint8)) for k, x in a.items())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_decoded_is_what_is_faked_and_is_encoded_alike(name, shape):
    form, w = format_of(name), weight(shape)
    parts = form.encode(w)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(form.decode(parts, dtype), form.fake(w, dtype))
    assert same(form.encode(form.decode(parts)), parts)
    assert sum(x.nbytes for x in parts.values()) == form.stored_bytes(shape)
    assert form.decode(parts).shape == w.shape


@pytest.mark.parametrize("name", FORMATS)
def test_its_error_and_its_size(name):
    form, w = format_of(name), weight((1024, 1024))
    error, bits = BOUNDS[name]
    assert float((form.fake(w) - w).norm() / w.norm()) < error
    assert 8 * form.stored_bytes(w.shape) / w.numel() < bits


@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(0, 10**6),
    st.floats(-30, 30),
    st.sampled_from(["normal", "heavy", "sparse", "one", "zeros", "ties"]),
)
@settings(max_examples=60, deadline=None)
def test_any_weights_are_encoded_alike_a_second_time(name, seed, power, kind):
    form, rng = format_of(name), np.random.default_rng(seed)
    x = rng.standard_normal((5, 70))
    if kind == "heavy":
        x = x * np.exp(4 * rng.standard_normal(x.shape))
    elif kind == "sparse":
        x = x * (rng.random(x.shape) < 0.05)
    elif kind == "one":
        x = np.eye(5, 70)
    elif kind == "zeros":
        x = np.zeros((5, 70))
    elif kind == "ties":
        x = rng.integers(-28, 29, (5, 70)) / 4
    w = torch.from_numpy(x * 2.0**power).float()
    parts = form.encode(w)
    again = form.decode(parts)
    assert same(form.encode(again), parts) and torch.equal(form.decode(form.encode(again)), again)
    assert bool(torch.isfinite(again).all())


@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_passes_as_if_nothing_were_there(name):
    w, x = weight((40, 64)).requires_grad_(), weight((7, 64), 1, 1.0)
    (x @ format_of(name).fake(w).t()).square().sum().backward()
    fixed = format_of(name).fake(w.detach()).requires_grad_()
    (x @ fixed.t()).square().sum().backward()
    assert torch.equal(w.grad, fixed.grad)


def test_codes_are_those_of_the_tables():
    """E2M1 by the nearest of eight numbers, ties to the even code; E4M3 by torch, without NaN above 448."""
    x = torch.linspace(-7, 7, 4001)
    table = torch.tensor(VALUES)
    near = (x.abs()[:, None] - table).abs()
    ties = near == near.amin(1, keepdim=True)
    want = torch.tensor([min(row.nonzero()[:, 0].tolist(), key=lambda code: code % 2) for row in ties])
    assert torch.equal(to_e2m1(x) & 7, want.to(torch.uint8))
    assert torch.equal(from_e2m1(to_e2m1(x)).abs(), table[want]) and bool((from_e2m1(to_e2m1(x)) * x >= 0).all())
    assert to_e4m3(torch.tensor([500.0, -1e4, 448.0, 17.0])).float().tolist() == [448, -448, 448, 16]


def test_packing_is_reversed():
    codes = torch.randint(0, 16, (3, 5, 29), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 29).long(), codes)
    assert torch.equal(unpack_pairs(pack_pairs(codes.to(torch.uint8)), 29).long(), codes)
    assert pack_nibbles(torch.tensor([[1, 2, 0, 0, 0, 0, 0, 15]])).tolist() == [[0x21 - (1 << 28)]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_told(name, bad):
    w = weight((40, 64))
    w[3, 5] = bad
    with pytest.raises(ModelError, match=r"not finite.*trainer\.lr"):
        format_of(name).encode(w)


def test_a_format_that_is_none_is_told():
    with pytest.raises(ConfigError, match=r'"fp5" is no number format; there are fp8, .*nvfp4'):
        format_of("fp5")


@pytest.mark.parametrize("apart", range(17))
def test_mxfp4_is_fp8_without_loss_up_to_2_to_14(apart):
    """Every number of E2M1 under the smallest and the largest scale of a block; the block beside it is another's business."""
    rows = torch.tensor([*VALUES, *(-v for v in VALUES)]).repeat(2)
    w = torch.zeros(130, 256)
    w[0, :32], w[1, :32] = rows * 2.0**-5, rows * 2.0 ** (apart - 5)
    w[129, 130:162] = rows * 2.0**9
    parts = Mxfp4().encode(w)
    assert torch.equal(Mxfp4().decode(parts), w)
    folded, lost = fold_to_fp8(parts)
    assert lost.tolist() == [[apart > 14, False], [False, False]]
    if apart <= 14:
        assert torch.equal(format_of("fp8").decode(folded), w)


def test_bits_of_fp8_are_those_of_a_cast():
    """Every code under many scales; where a scale has more bits, is huge, or a code is no number, the cast itself is taken."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1).view(torch.float8_e4m3fn)
    numbers = codes[:, [i for i in range(256) if i & 0x7F != 0x7F]].contiguous()
    g = torch.Generator().manual_seed(0)
    form = Fp8((1, 128))
    for exponent in (-100, -60, -20, -3, 0, 5):
        scale = torch.ldexp(torch.rand(16, 2, generator=g) + 0.5, torch.tensor(exponent)).bfloat16().float()
        spread = scale.repeat_interleave(128, 1)[:, : numbers.shape[1]]
        got = form.decode({"weight": numbers, "weight_scale_inv": scale}, torch.bfloat16)
        assert widen_codes(numbers, scale) is not None
        assert torch.equal(got.view(torch.int16), (numbers.float() * spread).bfloat16().view(torch.int16))
    odd = torch.rand(16, 2, generator=g)
    assert widen_codes(numbers, odd) is None and widen_codes(numbers, scale * 2**9) is None
    assert widen_codes(codes, scale) is None
    got = form.decode({"weight": numbers, "weight_scale_inv": odd}, torch.bfloat16)
    assert torch.equal(got, (numbers.float() * odd.repeat_interleave(128, 1)[:, : numbers.shape[1]]).bfloat16())
