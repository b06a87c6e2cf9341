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
void columns_##name(const T *x, int64_t from, const T *panel, int64_t words, float *sums) { \\
    column_sums(x, from, panel, words, sums); \\
} \\
void sizes_##name(int64_t tokens, int64_t *sizes) { sizes[0] = TILE<T>, sizes[1] = column_words<T>(tokens); } \\
void outputs_##name(const T *weight, int64_t in, int64_t count, T *panel) { put_outputs<T>(weight, in, count, panel); } \\
void tokens_##name(const T *from, int64_t step, int64_t rows, int64_t count, T *panel) { put_columns(from, step, rows, count, panel); } \\
void tiles_##name(const T *grad, int64_t step, int64_t rows, int64_t width, T *to) { \\
    put_tiles(grad, step, rows, width, 0, column_words<T>(rows), to); \\
}
extern "C" {
LOOPS(float, float32)
LOOPS(bf16, bfloat16)
}
"""
ARGUMENTS = {"rows": 6, "columns": 5, "sizes": 2, "outputs": 4, "tokens": 5, "tiles": 5}
PROCESSORS = pytest.mark.parametrize("processor", ["haswell", "native"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, sources = tmp_path_factory.mktemp("tiles"), Path(native_library.__file__).parent
    if (compiler := shutil.which("c++")) is None or not {"avx2", "fma"} <= native_library._abilities():
        pytest.skip("needs a C++ compiler and an x86 processor with AVX2")
    (folder / "driver.cpp").write_text(DRIVER)
    found = {}
    native_library.native_library()  # asks for AMX's registers
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


def sizes_of(library, tokens, dtype):
    """Outputs of a tile, and words of its columns."""
    sizes = torch.zeros(2, dtype=torch.int64)
    call(library, "sizes", dtype, tokens, sizes)
    return sizes.tolist()


def tiles_of(library, grad):
    """[tokens, width] -> [tiles, numbers of each]."""
    outputs, words = sizes_of(library, len(grad), grad.dtype)
    out = torch.full(
        (-(-grad.shape[1] // outputs), outputs * words * joined(grad.dtype)), float("nan"), dtype=grad.dtype
    )
    call(library, "tiles", grad.dtype, grad, grad.stride(0), len(grad), grad.shape[1], out)
    return out


def panel_of(library, x):
    """[tokens, at most WIDTH] -> [words of a column, WIDTH, numbers of a word]."""
    words = sizes_of(library, len(x), x.dtype)[1]
    panel = torch.full((words, WIDTH, joined(x.dtype)), float("nan"), dtype=x.dtype)
    call(library, "tokens", x.dtype, x, x.stride(0), len(x), x.shape[1], panel)
    return panel


@PROCESSORS
@DTYPES
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 129, 600])
def test_sums_of_columns(tokens, dtype, processor, compiled):
    """Outputs of a weight's gradient, over tokens; a later part of them alone has the bits that it has in the whole."""
    library = compiled[processor]
    grad, x = numbers(tokens, 50, dtype=dtype), numbers(tokens, WIDTH, dtype=dtype, seed=1)
    (outputs, words), panel = sizes_of(library, tokens, dtype), panel_of(library, x)
    for tile, own in enumerate(tiles_of(library, grad)):
        out, rest = torch.full((2, outputs, WIDTH), float("nan"))
        call(library, "columns", dtype, own, 0, panel, words, out)
        part = grad[:, tile * outputs : (tile + 1) * outputs]
        wanted = torch.zeros(outputs, WIDTH, dtype=torch.float64)
        wanted[: part.shape[1]] = part.double().t() @ x.double()
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6 * tokens)
        if words > 64:
            call(library, "columns", dtype, own, 64, panel, words - 64, rest)
            behind = torch.cat([torch.zeros_like(x[: 64 * joined(dtype)]), x[64 * joined(dtype) :]])
            call(library, "columns", dtype, own, 0, panel_of(library, behind), words, out)
            assert torch.equal(rest, out)


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
    x = numbers(tokens, count + 3, dtype=dtype)[:, :count]
    panel = panel_of(compiled[processor], x)
    wanted = torch.zeros(len(panel) * joined(dtype), WIDTH, dtype=dtype)
    wanted[:tokens, : min(count, WIDTH)] = x[:, :WIDTH]
    assert torch.equal(panel, in_words(wanted))


@PROCESSORS
@DTYPES
@pytest.mark.parametrize("width", [12, 29, 5, 32, 70])
@pytest.mark.parametrize("tokens", [1, 2, 7, 12, 32])
def test_gradients_become_tiles(tokens, width, dtype, processor, compiled):
    """Each number is in its place, and zeros behind the last output and the last token: a panel with a 1 in each row
    reads them."""
    library = compiled[processor]
    grad, (outputs, words) = numbers(tokens, width + 3, dtype=dtype)[:, :width], sizes_of(library, tokens, dtype)
    panel = panel_of(library, torch.eye(WIDTH, dtype=dtype)[:tokens])
    for part, own in zip(grad.split(outputs, 1), tiles_of(library, grad), strict=True):
        out, wanted = torch.full((outputs, WIDTH), float("nan")), torch.zeros(outputs, WIDTH)
        call(library, "columns", dtype, own, 0, panel, words, out)
        wanted[: part.shape[1], :tokens] = part.t().float()
        assert torch.equal(out, wanted) and not own.isnan().any()


@pytest.mark.parametrize(
    "bf16_vectors, avx2_alone, expected",
    [
        (True, False, {torch.float32, torch.bfloat16}),
        (False, True, {torch.float32, torch.bfloat16}),
        (False, False, set()),
    ],
)
def test_which_processors_have_them(bf16_vectors, avx2_alone, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16_vectors)
    monkeypatch.setattr("rondel.models.processor.has_avx2_alone", lambda: avx2_alone)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert {d for d in dtypes if multiplies_in_vectors.__wrapped__(d)} == expected
