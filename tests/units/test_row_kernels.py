"""models/row_kernels.py: Triton's interpreter computes what the modules of transformers do, values and gradients. On a
GPU the same tests run on the card."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kits.kernels import bfloat16_interpreter, moved_bytes
from rondel.models.kept_inputs import choose_gate_kernel, choose_norm_kernel

pytest.importorskip("triton", reason="pip install triton")
from rondel.models import row_kernels
from rondel.models.row_kernels import rms_norm, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def near(ours: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == wanted.shape
    assert (ours.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_a_norm_of_a_wide_and_of_a_rounded_stream(stream, monkeypatch):
    """Three rows a program at least, none a power of two."""
    monkeypatch.setattr(row_kernels, "PROGRAMS", 3)
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(20, 1e-5).to(DEVICE, torch.bfloat16)
    norm.weight.data.normal_()
    x = (torch.randn(2, 5, 20, device=DEVICE) * 3).to(stream).requires_grad_()
    up = torch.randn(2, 5, 20, device=DEVICE).bfloat16()
    wanted = norm(x).bfloat16()
    with bfloat16_interpreter():
        ours = rms_norm(x, norm.weight, norm.variance_epsilon)
        found = torch.autograd.grad(ours, [x, norm.weight], up)
        frozen = torch.autograd.grad(rms_norm(x, norm.weight.detach(), 1e-5), [x], up)[0]
    assert ours.dtype == torch.bfloat16 and found[0].dtype == stream
    near(ours, wanted, 2e-3)
    for a, b in zip(found, torch.autograd.grad(wanted, [x, norm.weight], up), strict=True):
        near(a, b, 8e-3)
    assert torch.equal(frozen, found[0])
    with torch.no_grad(), bfloat16_interpreter():
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), ours)


def test_a_norm_in_fp32_against_its_formula_in_fp64():
    torch.manual_seed(0)
    x, w, up = (
        torch.randn(7, 33, device=DEVICE),
        torch.randn(33, device=DEVICE).half(),
        torch.randn(7, 33, device=DEVICE).half(),
    )
    wide, weight = x.double().requires_grad_(), w.double().requires_grad_()
    wanted = weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    x, w = x.requires_grad_(), w.requires_grad_()
    ours = rms_norm(x, w, 1e-6)
    near(ours, wanted, 1e-3)
    dx, dw = torch.autograd.grad(wanted, [wide, weight], up.double())
    found = torch.autograd.grad(ours, [x, w], up)
    near(found[0], dx, 1e-6)
    near(found[1], dw, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_of_a_gate_times_what_it_gates(dtype):
    torch.manual_seed(0)
    given = [(torch.randn(3, 700, device=DEVICE) * 3).to(dtype).requires_grad_() for _ in range(2)]
    up = torch.randn(3, 700, device=DEVICE).to(dtype)
    wanted = nn.functional.silu(given[0]) * given[1]
    with bfloat16_interpreter():
        ours = swiglu(*given)
        found = torch.autograd.grad(ours, given, up)
    for a, b in zip([ours, *found], [wanted, *torch.autograd.grad(wanted, given, up)], strict=True):
        assert a.dtype == dtype
        near(a, b, 5e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
def test_bytes_moved_are_those_of_the_formulas(monkeypatch):
    monkeypatch.setattr(row_kernels, "PROGRAMS", 3)
    x, w = torch.randn(7, 20, requires_grad=True), torch.ones(20).half().requires_grad_()
    gate = torch.randn(2, 700).half().requires_grad_()
    for run, leaves, of in (
        (lambda: rms_norm(x, w, 1e-6), [x, w], functools.partial(row_kernels.norm_bytes, 7, 20, 4)),
        (
            lambda: swiglu(gate, gate.detach().requires_grad_()),
            [gate],
            functools.partial(row_kernels.gate_bytes, 1400, 2),
        ),
    ):
        with moved_bytes() as moved:
            out = run()
        assert moved.total() == of(backward=False)
        with moved_bytes() as moved:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert moved.total() == of(backward=True)


def test_no_rows():
    x, w = torch.randn(0, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE).half().requires_grad_()
    (rms_norm(x, w, 1e-6).sum() + swiglu(w[:0], w[:0]).sum()).backward()
    assert x.grad.shape == (0, 8) and not w.grad.any()


class OnCard(torch.Tensor):
    """Says that it is on a card."""

    device = torch.device("cuda")


def test_which_code_computes_it_and_why():
    x, half = torch.randn(2, 8).as_subclass(OnCard), torch.randn(2, 8).half().as_subclass(OnCard)
    norm = Qwen3RMSNorm(8).half()
    assert choose_norm_kernel(norm, x).takes_kernel and choose_gate_kernel(nn.SiLU(), half, half).takes_kernel
    assert choose_norm_kernel(Gemma2RMSNorm(8).half(), x).reason == "the kernel does not compute another formula"
    assert choose_norm_kernel(norm.float(), x).reason.endswith("weights of more than 16 bits")
    assert choose_norm_kernel(norm.half(), torch.randn(2, 8)).reason.startswith("the tensors are on cpu")
    assert "activation GELU, torch.float32 beside torch.float32" in choose_gate_kernel(nn.GELU(), x, x).reason
