"""The chunked logprob and entropy against autograd on full logits, and what it keeps for its backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rondel.models.head import LMHead
from rondel.train import logprobs
from rondel.train.logprobs import logprob_and_entropy

torch.set_num_threads(1)
D, V = 16, 301
CHUNK = 64  # rows
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": 0.25},
    "all": {"bias": True, "softcap": 4.0, "scale": 1.7},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS", CHUNK * V)


def setup(m: int, how: str, seed: int = 0):
    torch.manual_seed(seed)
    knobs = dict(HEADS[how])
    bias = nn.Parameter(torch.randn(V)) if knobs.pop("bias", False) else None
    head = LMHead(nn.Parameter(torch.randn(V, D) * 0.7), bias, **knobs)
    return torch.randn(m, D, requires_grad=True), torch.randint(0, V, (m,)), head


def reference(hidden, target, head: LMHead, temperature: float):
    """Full logits in float64, autograd does the rest. -> (logprob, entropy, leaves)."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]
    h, w, *b = leaves
    logits = head.scale * (h @ w.T + (b[0] if b else 0.0))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1), leaves


def close(ours, exact, tolerance: float) -> None:
    assert (ours.double() - exact).norm() <= tolerance * (exact.norm() + 1e-12), (
        (ours.double() - exact).norm() / exact.norm()
    ).item()


@pytest.mark.parametrize("how", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("m", [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_forward_and_backward_equal_autograd_on_full_logits(how, temperature, m):
    hidden, target, head = setup(m, how)
    logprob, entropy = logprob_and_entropy(hidden, target, head, temperature=temperature)
    exact_logprob, exact_entropy, leaves = reference(hidden, target, head, temperature)
    assert logprob.dtype == entropy.dtype == torch.float32 and logprob.shape == entropy.shape == (m,)
    assert torch.allclose(logprob.double(), exact_logprob, atol=1e-5, rtol=1e-6)
    assert torch.allclose(entropy.double(), exact_entropy, atol=1e-5, rtol=1e-6)
    torch.manual_seed(1)
    up = torch.randn(2, m)
    for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, -0.3)):
        mine = torch.autograd.grad(
            (a * up[0] * logprob + b * up[1] * entropy).sum(),
            [hidden, head.weight, *([] if head.bias is None else [head.bias])],
            retain_graph=True,
        )
        exact = torch.autograd.grad(
            (a * up[0].double() * exact_logprob + b * up[1].double() * exact_entropy).sum(), leaves, retain_graph=True
        )
        for ours, theirs in zip(mine, exact, strict=True):
            close(ours, theirs, 5e-6)


def test_one_output_alone_can_be_used():
    """Autograd then hands over no gradient for the other one."""
    hidden, target, head = setup(5, "plain")
    exact_logprob, exact_entropy, leaves = reference(hidden, target, head, 1.0)
    for which, exact in enumerate((exact_logprob, exact_entropy)):
        out = logprob_and_entropy(hidden, target, head)[which]
        ours = torch.autograd.grad(out.sum(), [hidden, head.weight])
        for a, b in zip(ours, torch.autograd.grad(exact.sum(), leaves, retain_graph=True)):
            close(a, b, 5e-6)


def test_no_tokens():
    hidden, target, head = setup(0, "bias")
    logprob, entropy = logprob_and_entropy(hidden, target, head)
    assert logprob.shape == entropy.shape == (0,) and logprob.dtype == torch.float32
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, D) and not head.weight.grad.any() and not head.bias.grad.any()


def test_the_rows_do_not_depend_on_each_other():
    hidden, target, head = setup(CHUNK + 9, "all")
    whole, _ = logprob_and_entropy(hidden, target, head, temperature=0.8)
    alone = torch.stack(
        [
            logprob_and_entropy(hidden[i : i + 1], target[i : i + 1], head, temperature=0.8)[0][0]
            for i in range(0, CHUNK + 9, 37)
        ]
    )
    assert (whole[::37] - alone).abs().max() <= 5e-6


def test_extreme_logits_stay_finite():
    hidden, target, head = setup(4, "plain")
    big = (hidden.detach() * 1e4).requires_grad_()
    logprob, entropy = logprob_and_entropy(big, target, head)
    (logprob + entropy).sum().backward()
    assert (
        logprob.isfinite().all()
        and entropy.isfinite().all()
        and big.grad.isfinite().all()
        and head.weight.grad.isfinite().all()
    )
    assert (entropy >= 0).all()


@pytest.mark.parametrize("m", [CHUNK - 1, 4 * CHUNK])
def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward(m):
    hidden, target, head = setup(m, "all")
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        logprob, entropy = logprob_and_entropy(hidden, target, head, temperature=0.7)
    # what ctx holds beside the saved tensors
    held = [t.shape for t in vars(logprob.grad_fn).values() if isinstance(t, torch.Tensor)]
    assert kept and not [s for s in [*kept, *held] if len(s) == 2 and m in s and V in s]
    assert all(len(s) == 1 for s in held)
    (logprob.sum() + entropy.sum()).backward()


def test_bfloat16_head_gives_float32_logprobs_near_the_truth():
    hidden, target, head = setup(300, "plain")
    half = LMHead(nn.Parameter(head.weight.detach().bfloat16()))
    h = hidden.detach().bfloat16().requires_grad_()
    logprob, entropy = logprob_and_entropy(h, target, half, temperature=0.9)
    exact, _, leaves = reference(h, target, half, 0.9)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert (logprob.double() - exact).abs().max() < 0.1
    grads = torch.autograd.grad(logprob.sum(), [h, half.weight])
    for ours, theirs in zip(grads, torch.autograd.grad(exact.sum(), leaves)):
        assert ours.dtype == torch.bfloat16
        close(ours, theirs, 1e-2)
