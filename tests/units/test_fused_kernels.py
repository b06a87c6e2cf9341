"""flash-linear-attention in place of the formulas: what is handed over is what its functions are documented to take.

Its kernels need a GPU; here functions of the same signature compute token by token. Where the package is installed, its
own signatures and its own references in torch are compared.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kits.engine import prompt
from kits.families import model
from rondel.core.errors import ModelError
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent import fused_kernels, mixers
from rondel.models.recurrent.fused_kernels import KERNELS, FusedKernels
from rondel.models.recurrent.gated_delta import GatedDelta
from rondel.models.recurrent.mamba2 import Mamba2Scan


def _checked(q, k, v, g, initial_state, channels):
    rows, length, heads, size = q.shape
    assert k.shape == q.shape and v.shape[:3] == q.shape[:3]
    assert g.shape == (rows, length, heads, size) if channels else g.shape == (rows, length, heads)
    assert initial_state.shape == (rows, heads, size, v.shape[3]) and initial_state.dtype == g.dtype == torch.float32
    assert all(x.is_contiguous() for x in (q, k, v, g, initial_state))


def delta(channels, is_step=False):
    def run(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs,
    ):  # fmt: skip
        _checked(q, k, v, g, initial_state, channels)
        assert output_final_state and beta.shape == q.shape[:3] and not (is_step and torch.is_grad_enabled())
        state, out = initial_state, []
        for t in range(q.shape[1]):
            fade = g[:, t].exp() if channels else g[:, t, :, None].exp()
            state = state * fade[..., None]
            written = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * written[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
        return torch.stack(out, 1), state

    return run


def fading(is_step=False):
    def run(
        q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
        **kwargs,
    ):  # fmt: skip
        _checked(q, k, v, g, initial_state, channels=False)
        assert output_final_state and not (is_step and torch.is_grad_enabled())
        state, out = initial_state, []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
        return torch.stack(out, 1), state

    return run


STAND_INS = FusedKernels(
    {
        "delta": delta(False),
        "delta_step": delta(False, True),
        "channels": delta(True),
        "channels_step": delta(True, True),
        "fading": fading(),
        "fading_step": fading(True),
    },
    torch.float32,
)
# a prompt, answers of several lengths and of one token, one that continues an answer
SEGMENTS = [(0, 20, None), (20, 9, 0), (29, 7, 0), (36, 1, 0), (37, 5, 1)]


def answer(loaded, wants_gradient):
    tokens, positions = torch.tensor(prompt(3, 42)), []
    depth = {0: 0, 1: 20, 2: 20, 3: 20, 4: 29}
    for i, (_, length, _) in enumerate(SEGMENTS):
        positions += range(depth[i], depth[i] + length)
    with torch.set_grad_enabled(wants_gradient):
        layout = PackedLayout([PackedSegment(*s) for s in SEGMENTS])
        logits = loaded.head.logits(loaded.hidden_states(tokens, torch.tensor(positions), layout))
        if not wants_gradient:
            return logits, []
        named = [p for p in loaded.model.parameters() if p.requires_grad]
        weight = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        return logits, torch.autograd.grad((logits * weight).sum(), named, allow_unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "bamba", "minimax"])
def test_a_packed_tree_through_kernels_is_that_of_the_formulas(monkeypatch, kind):
    """Values and gradients of all weights; padded rows, states of parents, and rows of one token among them."""
    loaded = model(kind)
    plain = [answer(loaded, wants) for wants in (False, True)]
    monkeypatch.setattr(mixers, "fused_kernels", lambda hidden, key: STAND_INS)
    calls: list[str] = []
    run = FusedKernels._run
    monkeypatch.setattr(
        FusedKernels, "_run", lambda self, name, *a, **kw: calls.append(name) or run(self, name, *a, **kw)
    )
    for wants, (logits, grads) in zip((False, True), plain):
        ours, own = answer(loaded, wants)
        assert float((ours - logits).detach().abs().max()) <= 1e-4
        assert [a is None for a in own] == [b is None for b in grads]
        if pairs := [(a, b) for a, b in zip(own, grads) if a is not None]:
            whole = float(torch.stack([b.norm() for _, b in pairs]).norm())
            assert float(torch.stack([(a - b).norm() for a, b in pairs]).norm()) <= 1e-5 * whole
    assert set(calls) == {{"qwen3_5_text": "delta", "kimi_linear": "channels"}.get(kind, "fading")}


def test_kernels_are_for_gpus_and_16_bits(monkeypatch):
    monkeypatch.setattr(fused_kernels, "is_installed", lambda: True)
    monkeypatch.setattr(fused_kernels, "load_kernels", lambda: STAND_INS.functions)

    def on(is_cuda, dtype):
        return SimpleNamespace(is_cuda=is_cuda, dtype=dtype)

    assert fused_kernels.fused_kernels(on(False, torch.bfloat16), 128) is None
    assert fused_kernels.fused_kernels(on(True, torch.float32), 128) is None
    assert fused_kernels.fused_kernels(on(True, torch.bfloat16), 512) is None
    assert fused_kernels.fused_kernels(on(True, torch.bfloat16), 128).dtype == torch.bfloat16
    monkeypatch.setattr(fused_kernels, "is_installed", lambda: False)
    assert fused_kernels.fused_kernels(on(True, torch.bfloat16), 128) is None


def test_what_is_rounded_and_what_is_not():
    seen = {}

    def run(**given):
        seen.update({name: x.dtype for name, x in given.items() if isinstance(x, torch.Tensor)})
        return given["v"], given["initial_state"]

    kernels = FusedKernels(dict.fromkeys(KERNELS, run), torch.bfloat16)
    inputs = [torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 5), torch.zeros(1, 3, 2, 1)]
    out, state = GatedDelta(2, 4, 5, kernels)(torch.zeros(1, 2, 4, 5), [*inputs, torch.ones(1, 3, 2)], None)
    assert out.dtype == state.dtype == torch.float32
    assert {seen.pop(name) for name in ("g", "initial_state")} == {torch.float32}
    assert seen.keys() == {"q", "k", "v", "beta"} and set(seen.values()) == {torch.bfloat16}


@pytest.mark.parametrize("broken", ["absent", "other arguments"])
def test_another_version_is_an_error_with_a_remedy(monkeypatch, broken):
    for path, function, _ in KERNELS.values():
        module = sys.modules.get(path) if getattr(sys.modules.get(path), "fake", False) else ModuleType(path)
        module.fake = True
        if broken != "absent":
            setattr(module, function, lambda q, k, v: None)
        monkeypatch.setitem(sys.modules, path, module)
    with pytest.raises(ModelError, match=r"(cannot be had|takes no 'g').*flash-linear-attention 0\.6\.0"):
        fused_kernels.load_kernels.__wrapped__()


def test_the_installed_package_takes_these_arguments_and_means_the_same():
    """Its references in torch, which its own tests hold the kernels to."""
    pytest.importorskip("fla")
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    for name, function in fused_kernels.load_kernels.__wrapped__().items():
        assert set(KERNELS[name][2]) <= set(inspect.signature(function).parameters)
    theirs = {
        "delta": naive_recurrent_gated_delta_rule,
        "channels": naive_recurrent_kda,
        "fading": naive_recurrent_simple_gla,
    }
    kernels, g = FusedKernels(theirs, torch.float32), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 70, 3, n, generator=g) for n in (8, 8, 6))
    k = k / k.norm(dim=-1, keepdim=True)
    beta, state = torch.rand(2, 70, 3, generator=g), torch.randn(2, 3, 8, 6, generator=g)
    for channels in (1, 8):
        fade = -torch.rand(2, 70, 3, channels, generator=g)
        ours, own = GatedDelta(3, 8, 6)(state, [q, k, v, fade, beta], None)
        out, final = GatedDelta(3, 8, 6, kernels)(state, [q, k, v, fade, beta], None)
        assert torch.allclose(ours, out, atol=1e-4) and torch.allclose(own, final, atol=1e-4)
    given = [v, fade[..., 0], k, q]
    ours, own = Mamba2Scan(3, 6, 8)(state.transpose(-1, -2), given, None)
    out, final = Mamba2Scan(3, 6, 8, kernels)(state.transpose(-1, -2), given, None)
    assert torch.allclose(ours, out, atol=1e-4) and torch.allclose(own, final, atol=1e-4)
