"""Tiles of cpu_tiles.h in float32, compiled for AVX2 and for this processor: sums of any number of rows and words, with the
same bits in every company and by both, and panels of weights.
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
extern "C" {
void rows(int64_t count, const float *x, int64_t step, const float *panel, int64_t words, float *sums) {
    panel_sums<float>(count, x, step, panel, words, sums);
}
void columns(const float *x, const float *panel, int64_t words, float *sums) {
    tile_sums<float, TILE, TILE>(x, 1, panel, words, sums);
}
void outputs(const float *weight, int64_t in, int64_t count, float *panel) { put_outputs<float>(weight, in, count, panel); }
}
"""
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
        for name, count in {"rows": 6, "columns": 4, "outputs": 4}.items():
            getattr(found[processor], name).argtypes = [ctypes.c_void_p] * count  # numbers and addresses alike
    return found


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sums_of(library, x, panel):
    """x [rows, words], whose rows may lie apart, times a panel [words, WIDTH]."""
    out = torch.full((len(x) + 1, WIDTH), float("nan"))
    library.rows(len(x), x.data_ptr(), x.stride(0), panel.data_ptr(), len(panel), out.data_ptr())
    assert out[-1].isnan().all(), "nothing is written behind the last row"
    return out[:-1]


@pytest.mark.parametrize("words", [1, 63, 64, 65, 200, 1040])
def test_sums_of_rows(words, compiled):
    x, panel = numbers(40, words + 5)[:, :words], numbers(words, WIDTH, seed=1)
    wanted, found = x.double() @ panel.double(), {}
    for name, library in compiled.items():
        found[name] = out = sums_of(library, x, panel)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6 * words)
        for rows in range(1, 30):
            some = sums_of(library, x[3 : 3 + rows], panel)
            assert torch.equal(some, out[3 : 3 + rows]), "a row has its bits in every company"
    assert torch.equal(found["haswell"], found["native"])


@PROCESSORS
@pytest.mark.parametrize("words", [1, 64, 300])
def test_sums_of_columns(words, processor, compiled):
    """Twelve outputs of a weight's gradient, whose numbers lie beside each other."""
    x, panel, out = numbers(words, 12), numbers(words, WIDTH, seed=1), torch.empty(12, WIDTH)
    compiled[processor].columns(x.data_ptr(), panel.data_ptr(), words, out.data_ptr())
    torch.testing.assert_close(out.double(), x.double().t() @ panel.double(), rtol=1e-5, atol=1e-6 * words)


@PROCESSORS
@pytest.mark.parametrize("count", [HALF, 5])
@pytest.mark.parametrize("inside", [1, 8, 29, 48])
def test_outputs_of_a_weight_become_half_of_a_panel(inside, count, processor, compiled):
    weight, panel = numbers(HALF, inside), torch.full((inside, WIDTH), float("nan"))
    compiled[processor].outputs(weight.data_ptr(), inside, count, panel.data_ptr())
    assert torch.equal(panel[:, :count], weight[:count].t())
    assert not panel[:, count:HALF].any() and panel[:, HALF:].isnan().all(), "the other half is left as it is"


@pytest.mark.parametrize(
    "bf16_vectors, amx, avx2_alone, expected",
    [
        (True, False, False, {torch.float32, torch.bfloat16}),
        (True, True, False, set()),  # oneDNN's tiles are faster
        (False, False, True, {torch.float32}),
        (False, False, False, set()),
    ],
)
def test_which_processors_have_them(bf16_vectors, amx, avx2_alone, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16_vectors)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("rondel.models.processor.has_avx2_alone", lambda: avx2_alone)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    assert {d for d in dtypes if multiplies_in_vectors.__wrapped__(d)} == expected
