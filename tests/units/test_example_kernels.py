"""The kernels of examples/ in other languages than Triton: "cuda_kernel:rms_norm" (CUDA C++ through NVRTC) and
"tilelang_kernel:rms_norm". Each is compiled where its package is installed, and compared where there is a GPU, too."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

PACKAGES = {"cuda_kernel:rms_norm": "cuda.core", "tilelang_kernel:rms_norm": "tilelang"}


def example(name: str):
    return importlib.import_module(name.partition(":")[0])


def needs(name: str):
    return pytest.importorskip(PACKAGES[name], reason="the package of the example is not installed")


def inputs(device: str = "cpu"):
    g = torch.Generator().manual_seed(0)
    return torch.randn(37, 320, generator=g).to(device), torch.rand(320, generator=g).to(device)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_plain_code_is_that_of_torch(name):
    x, w = inputs()
    torch.testing.assert_close(example(name).plain_rms_norm(x, w), F.rms_norm(x, (320,), w, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_cuda_is_compiled_for_cards_that_are_not_here(capability):
    needs("cuda_kernel:rms_norm")
    pytest.importorskip("cuda.bindings.nvrtc")
    made = example("cuda_kernel:rms_norm").compiled(capability)
    assert made.startswith(b"\x7fELF") and b"rms_norm" in made


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_tilelang_writes_a_kernel_for_cards_that_are_not_here(capability):
    needs("tilelang_kernel:rms_norm")
    written = example("tilelang_kernel:rms_norm").source(capability)
    assert "__global__" in written and "rsqrtf" in written


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", PACKAGES)
def test_the_kernel_computes_what_the_plain_code_does(name):
    needs(name)
    x, w = inputs("cuda")
    module = example(name)
    torch.testing.assert_close(module.rms_norm(x, w), module.plain_rms_norm(x, w))
