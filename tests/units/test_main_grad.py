"""Gradients that are added in place equal those of autograd, and no dense [V, D] gradient is made."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kits.sweeps import covering
from rondel.models import linear
from rondel.models.head import LMHead, adopt_embedding
from rondel.models.linear import install_cpu_linear
from rondel.models.main_grad import main_grad
from rondel.train import logprobs
from rondel.train.optim import MasterWeights

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def one(tied: bool, padding: int | None, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9000, pad_token_id=padding, tie_word_embeddings=tied, **TINY))
    return model.to(dtype)


def backward(model: LlamaForCausalLM, rounds: int, logits: int = 1 << 25) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        ids = torch.randint(0, 9000, (1, 40), generator=generator)
        ids[0, 3:9] = ids[0, 0]  # one row of the embedding is read by several tokens
        ids[0, 11] = 7
        hidden = model.model(ids).last_hidden_state[0]
        old, logprobs.LOGITS = logprobs.LOGITS, logits
        try:
            logprob, entropy = logprobs.logprob_and_entropy(
                hidden[:-1], ids[0, 1:], LMHead.from_model(model), temperature=0.7
            )
            (logprob.sum() + 0.1 * entropy.sum()).backward()
        finally:
            logprobs.LOGITS = old


# every pair of two of them, among the four
PAIRWISE = [
    (torch.float32, True, None, 1 << 25),
    (torch.float32, False, 7, 9000 * 16),
    (torch.bfloat16, True, 7, 9000 * 16),
    (torch.bfloat16, False, None, 1 << 25),
]


@pytest.fixture(params=[True, False], ids=["mkl", "onednn"])
def mkl(request, monkeypatch) -> None:
    """Both ways to a linear layer's gradient, whatever processor this is."""
    monkeypatch.setattr(linear, "knows_mkl", lambda: request.param)


@pytest.mark.usefixtures("mkl")
@pytest.mark.parametrize(
    ("dtype", "tied", "padding", "logits"),
    covering(
        [
            (dtype, tied, *rest)
            for dtype in (torch.float32, torch.bfloat16)
            for tied in (True, False)
            for rest in ((None, 1 << 25), (7, 9000 * 16))
        ],
        PAIRWISE,
    ),
)
def test_the_sum_over_micro_batches_is_that_of_autograd(dtype, tied, padding, logits) -> None:
    plain, ours = one(tied, padding, torch.float32), one(tied, padding, dtype)
    plain.load_state_dict(ours.state_dict())
    install_cpu_linear(ours)
    adopt_embedding(ours)
    weights = MasterWeights(ours, betas=(0.9, 0.999), weight_decay=0.0)
    backward(plain, 3)
    backward(ours, 3, logits)
    for (name, wanted), master in zip(plain.named_parameters(), weights.masters):
        assert wanted.grad is not None and master.grad is not None
        error = (master.grad - wanted.grad).norm() / wanted.grad.norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.03), (name, float(error))
    if padding is not None and not tied:
        assert not weights.masters[0].grad[padding].any()


@pytest.mark.usefixtures("mkl")
def test_a_linear_layer_s_gradient_is_summed_in_fp32_from_bf16_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80)).bfloat16()
    install_cpu_linear(model)
    weights = MasterWeights(model, betas=(0.9, 0.999), weight_decay=0.0)
    wanted = torch.zeros(80, 48, dtype=torch.float64)
    for _ in range(50):
        x, grad = torch.randn(2, 7, 48).bfloat16(), torch.randn(2, 7, 80).bfloat16()
        model(x).backward(grad)
        wanted += grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    assert model[0].weight.grad is None
    if not linear.is_widened(torch.bfloat16):
        pytest.skip("bf16 instructions round the product of each micro-batch")
    assert (weights.masters[0].grad - wanted).norm() / wanted.norm() < 1e-6, "rounded to bf16 in between it is 3e-3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_dense_gradient_reaches_autograd(dtype) -> None:
    model = one(True, None, dtype)
    adopt_embedding(model)
    weights = MasterWeights(model, betas=(0.9, 0.999), weight_decay=0.0)
    matrix, fired = model.model.embed_tokens.weight, []  # a hook without a gradient gets None
    matrix.register_hook(lambda grad: fired.append(grad) if grad is not None else None)
    backward(model, 1)
    assert not fired and main_grad(matrix) is weights.masters[0].grad
    before = weights.masters[0].grad.clone()
    backward(model, 1)
    assert not fired and before.any() and not torch.equal(before, weights.masters[0].grad)


def test_a_model_without_an_optimizer_and_a_copy_of_one_go_autograd_s_way() -> None:
    model = one(True, None, torch.float32)
    adopt_embedding(model)
    MasterWeights(model, betas=(0.9, 0.999), weight_decay=0.0)
    other = copy.deepcopy(model)
    backward(model, 1)
    kept = model.model.embed_tokens.weight.grad.clone()
    backward(other, 2)
    assert torch.equal(kept, model.model.embed_tokens.weight.grad)
    assert main_grad(other.model.embed_tokens.weight) is None and other.model.embed_tokens.weight.grad is not None


def test_the_head_of_no_rows_has_a_gradient_of_zeros():
    model = one(True, None, torch.bfloat16)
    install_cpu_linear(model)
    masters = MasterWeights(model, betas=(0.9, 0.999), weight_decay=0.0)
    head = LMHead.from_model(model)
    hidden = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    logprob, _ = logprobs.logprob_and_entropy(hidden, torch.zeros(0, dtype=torch.int64), head, temperature=1.0)
    logprob.sum().backward()
    assert not main_grad(head.weight).any() and float(masters.gradient_norm()) == 0.0
