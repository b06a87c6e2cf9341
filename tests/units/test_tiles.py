"""Tiles of cpu_tiles.h, compiled for AVX2 and for this processor: sums of any number of rows and words, with the same bits
in every company, in float32 by both, and panels of weights and of tokens. In bfloat16 a word is two numbers, and an fp32 sum
takes the second one first.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rondel.models import native_library
from rondel.models.processor import multiplies_in_vectors

pytestmark = pytest.mark.slow  # the compiler takes ten seconds
WIDTH, HALF = 32, 16  # as in cpu_tiles.h
DRIVER = """
#include "cpu_panels.h"
#define LOOPS(T, name) \\
void rows_##name(int64_t count, const T *x, int64_t step, const T *panel, int64_t words, float *sums) { \\
    panel_sums<T>(count, x, step, panel, words, sums); \\
} \\
void columns_##name(const T *x, const T *panel, int64_t words, float *sums) { \\
    tile_sums<T, TILE, TILE>(x, JOINED<T>, panel, words, sums); \\
} \\
void outputs_##name(const T *weight, int64_t in, int64_t count, T *panel) { put_outputs<T>(weight, in, count, panel); } \\
void tokens_##name(const T *from, int64_t step, int64_t rows, int64_t count, T *panel) { put_rows(from, step, rows, count, panel); } \\
void tiles_##name(const T *grad, int64_t step, int64_t rows, int64_t width, T *to) { \\
    put_tiles(grad, step, rows, width, 0, words_of<T>(rows), to); \\
}
extern "C" {
LOOPS(float, float32)
LOOPS(bf16, bfloat16)
}
"""
ARGUMENTS = {"rows": 6, "columns": 4, "outputs": 4, "tokens": 5, "tiles": 5}
PROCESSORS = pytest.mark.parametrize("processor", ["haswell", "native"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, sources = tmp_path_factory.mktemp("tiles"), Path(native_library.__file__).parent
    if (compiler := shutil.which("c++")) is None or not {"avx2", "fma"} <= native_library._abilities():
        pytest.skip("needs a C++ compiler and an x86 processor with AVX2")
    (folder / "driver.cpp").write_text(DRIVER)
    found = {}
    for processor in ("haswell", "native"):
        options = [f"-march={processor}" if one.startswith("-march") else one for one in native_library.OPTIONS]
        file = folder / f"{processor}.so"
        command = [compiler, *options, f"-I{sources}", "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(file)]
        subprocess.run(command, check=True, capture_output=True)
        found[processor] = ctypes.CDLL(str(file))
    return found


def call(library, name, dtype, *given):
    """Numbers and addresses alike."""
    function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.argtypes = [ctypes.c_void_p] * ARGUMENTS[name]
    function(*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given))


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def joined(dtype):
    """Numbers of a word."""
    return 4 // dtype.itemsize


def sums_of(library, x, panel):
    """x [rows, numbers], whose rows may lie apart, times a panel [numbers, WIDTH]."""
    out, words = torch.full((len(x) + 1, WIDTH), float("nan")), len(panel) // joined(x.dtype)
    call(library, "rows", x.dtype, len(x), x, x.stride(0), in_words(panel), words, out)
    assert out[-1].isnan().all(), "nothing is written behind the last row"
    return out[:-1]


def in_words(panel):
    """[numbers, N] -> [words, N, numbers of a word]."""
    return panel.unflatten(0, (-1, joined(panel.dtype))).transpose(1, 2).contiguous()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("words", [1, 63, 64, 65, 200, 1040])
def test_sums_of_rows(words, dtype, compiled):
    inside = words * joined(dtype)
    x, panel = numbers(40, inside + 6, dtype=dtype)[:, :inside], numbers(inside, WIDTH, dtype=dtype, seed=1)
    wanted, found = x.double() @ panel.double(), {}
    for name, library in compiled.items():
        found[name] = out = sums_of(library, x, panel)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6 * inside)
        for rows in range(1, 30):
            some = sums_of(library, x[3 : 3 + rows], panel)
            assert torch.equal(some, out[3 : 3 + rows]), "a row has its bits in every company"
    assert dtype == torch.bfloat16 or torch.equal(found["haswell"], found["native"])


def test_the_second_number_of_a_word_comes_first(compiled):
    """As the instruction of AVX-512 for them has it."""
    small = 2.0**-24  # half of what 1 can be told apart from
    x, panel = (torch.tensor([row], dtype=torch.bfloat16) for row in ([0.0, small, 1.0, small], [1.0] * 4))
    assert (sums_of(compiled["haswell"], x, panel.t().repeat(1, WIDTH)) == 1 + 2 * small).all()


@PROCESSORS
@DTYPES
@pytest.mark.parametrize("words", [1, 64, 300])
def test_sums_of_columns(words, dtype, processor, compiled):
    """Twelve outputs of a weight's gradient, whose numbers lie beside each other: tokens as `put_tiles` lays them."""
    tokens, out = words * joined(dtype), torch.empty(12, WIDTH)
    grad, panel = numbers(tokens, 12, dtype=dtype), numbers(tokens, WIDTH, dtype=dtype, seed=1)
    call(compiled[processor], "columns", dtype, in_words(grad), in_words(panel), words, out)
    torch.testing.assert_close(out.double(), grad.double().t() @ panel.double(), rtol=1e-5, atol=1e-6 * tokens)


@PROCESSORS
@DTYPES
@pytest.mark.parametrize("count", [HALF, 5])
@pytest.mark.parametrize("words", [1, 8, 29, 48])
def test_outputs_of_a_weight_become_half_of_a_panel(words, count, dtype, processor, compiled):
    inside = words * joined(dtype)
    weight, panel = (
        numbers(HALF, inside, dtype=dtype),
        torch.full((words, WIDTH, joined(dtype)), float("nan"), dtype=dtype),
    )
    call(compiled[processor], "outputs", dtype, weight, inside, count, panel)
    assert torch.equal(panel[:, :count], in_words(weight[:count].t()))
    assert not panel[:, count:HALF].any() and panel[:, HALF:].isnan().all(), "the other half is left as it is"


@PROCESSORS
@DTYPES
@pytest.mark.parametrize("count", [WIDTH, WIDTH + 7, 5])
@pytest.mark.parametrize("tokens", [1, 2, 7, 12])
def test_tokens_become_a_panel(tokens, count, dtype, processor, compiled):
    """Of the first 32 numbers of each; behind the last number and the last token there are zeros."""
    x, words = numbers(tokens, count + 3, dtype=dtype), -(-tokens // joined(dtype))
    panel = torch.full((words, WIDTH, joined(dtype)), float("nan"), dtype=dtype)
    call(compiled[processor], "tokens", dtype, x, x.stride(0), tokens, count, panel)
    wanted = torch.zeros(words * joined(dtype), WIDTH, dtype=dtype)
    wanted[:tokens, : min(count, WIDTH)] = x[:, : min(count, WIDTH)]
    assert torch.equal(panel, in_words(wanted))


@PROCESSORS
@DTYPES
@pytest.mark.parametrize("width", [12, 29, 5])
@pytest.mark.parametrize("tokens", [1, 2, 7, 12])
def test_gradients_become_tiles(tokens, width, dtype, processor, compiled):
    """Twelve outputs in each, and zeros behind the last output and the last token."""
    grad, words, tiles = numbers(tokens, width + 3, dtype=dtype), -(-tokens // joined(dtype)), -(-width // 12)
    out = torch.full((tiles, words, 12, joined(dtype)), float("nan"), dtype=dtype)
    call(compiled[processor], "tiles", dtype, grad, grad.stride(0), tokens, width, out)
    wanted = torch.zeros(words * joined(dtype), tiles * 12, dtype=dtype)
    wanted[:tokens, :width] = grad[:, :width]
    assert torch.equal(out, torch.stack([in_words(part) for part in wanted.split(12, 1)]))


@pytest.mark.parametrize(
    "bf16_vectors, amx, avx2_alone, expected",
    [
        (True, False, False, {torch.float32, torch.bfloat16}),
        (True, True, False, set()),  # oneDNN's tiles are faster
        (False, False, True, {torch.float32, torch.bfloat16}),
        (False, False, False, set()),
    ],
)
def test_which_processors_have_them(bf16_vectors, amx, avx2_alone, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16_vectors)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("rondel.models.processor.has_avx2_alone", lambda: avx2_alone)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert {d for d in dtypes if multiplies_in_vectors.__wrapped__(d)} == expected
