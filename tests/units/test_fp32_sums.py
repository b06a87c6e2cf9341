"""Residual stream and logits of a 16-bit model in fp32: against float64, on both sides alike, and the alarm on the gap."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest
import torch
from torch.nn.functional import linear

from kits.engine import SIZE, all_of, ask, engine, prompt
from kits.families import FAMILIES
from rondel.algos.tokens import k3
from rondel.models import load, load_check
from rondel.models.fp32_sums import ROUNDING, StreamProbe, keeps_fp32_stream
from rondel.models.head import LMHead
from rondel.models.linear import equal_blocks, fp32_product, product
from rondel.models.load import load_model
from rondel.train.annotate import logprobs_of
from rondel.train.logprobs import logprob_and_entropy
from rondel.train.step_metrics import bound_of

HALVES = [torch.bfloat16, torch.float16]
LARGE = SIZE | {"num_hidden_layers": 4, "hidden_size": 128, "vocab_size": 512}


def numbers(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@cache
def model(numerics: str, kind: str = "llama"):
    """Random weights with logits of some 10, in bf16."""
    loaded = load_model({"random": kind, **LARGE, "seed": 3}, dtype="bfloat16")
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            if p.dim() > 1:
                p.mul_(6 if "embed" in name or "lm_head" in name else 3)
    if numerics == "rounded":
        loaded.round_sums()
    return loaded


def gap(loaded, spoilt=None) -> float:
    """K3 between what the engine stored and the training path, of 8 answers behind one prompt; `spoilt`: between them."""
    e, shared = engine(loaded), prompt(7, 21)
    done = asyncio.run(all_of(e, [ask(shared, key=i, n=32) for i in range(8)]))
    if spoilt is not None:
        spoilt()
    x = [
        torch.tensor(logprobs_of(loaded, shared + c.tokens)[len(shared) :]).double() - torch.tensor(c.logprobs).double()
        for c in done
    ]
    return float(k3(-torch.cat(x)).mean())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_are_those_of_float64(dtype, rows, packed):
    """Logits of 16 to 32 have steps of 0.125 in bfloat16; the head promises fp32."""
    hidden, weight, bias = (
        numbers(rows, 96, dtype=dtype),
        numbers(300, 96, seed=1, dtype=dtype),
        numbers(300, seed=2, dtype=dtype),
    )
    head = LMHead(torch.nn.Parameter(weight), torch.nn.Parameter(bias))
    exact = linear(hidden.double(), weight.double(), bias.double())
    with torch.set_grad_enabled(not packed):
        out = head.logits(hidden).detach()
        head.rounded = True
        rounded = head.logits(hidden).detach()
    assert out.dtype == torch.float32 and float((out - exact).abs().max()) < 2e-3
    assert float((rounded - exact).abs().max()) > (0.05 if dtype == torch.bfloat16 else 5e-3)


def test_a_head_cut_over_the_vocabulary_has_the_same_logits():
    hidden, weight = numbers(9, 96), numbers(300, 96, seed=1)
    whole = LMHead(torch.nn.Parameter(weight)).logits(hidden)
    parts = [LMHead(torch.nn.Parameter(w.clone())).logits(hidden) for w in weight.split(150)]
    assert float((torch.cat(parts, -1) - whole).detach().abs().max()) < 2e-3


def test_logprobs_and_their_gradient_are_those_of_fp32_logits():
    hidden, weight = numbers(30, 64), numbers(200, 64, seed=1, scale=0.5)
    target = torch.arange(30)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[torch.arange(30), target]
    wanted = -torch.autograd.grad(
        linear(h := hidden.double().requires_grad_(), weight.double()).log_softmax(-1)[torch.arange(30), target].sum(),
        h,
    )[0]
    ours = hidden.clone().requires_grad_()
    logprobs, _ = logprob_and_entropy(ours, target, LMHead(torch.nn.Parameter(weight)))
    (-logprobs.sum()).backward()
    assert float((logprobs.detach() - exact).abs().max()) < 2e-3
    assert float((ours.grad - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.slow
def test_the_stream_is_fp32_behind_every_layer_and_what_is_rounded_is_not():
    for numerics, wanted in (("fast", torch.float32), ("rounded", torch.bfloat16)):
        loaded = model(numerics)
        with StreamProbe(loaded.model, loaded.decoder) as stream:
            logprobs_of(loaded, prompt(3, 9))
        assert stream.dtypes == {wanted} and loaded.fp32_stream == (numerics == "fast")
        copy = loaded.copy_trainable()  # the reference
        assert copy.fp32_stream == loaded.fp32_stream and copy.head.rounded == loaded.head.rounded
        assert logprobs_of(copy, prompt(3, 9)) == logprobs_of(loaded, prompt(3, 9))


@pytest.mark.slow
def test_engine_and_trainer_are_nearer_and_the_alarm_is_set_by_the_noise():
    """A healthy run is silent under both, one whose engine has older weights is not."""
    near, far = gap(model("fast")), gap(model("rounded"))
    assert near < 0.6 * far
    assert near < bound_of(torch.bfloat16, mixture=False, foreign=False)
    assert far < bound_of(torch.bfloat16, mixture=False, foreign=False, rounded=True)
    stale = model("fast").copy_trainable()
    norm = stale.model.model.layers[1].mlp.down_proj.weight

    def spoil() -> None:
        with torch.no_grad():
            norm.mul_(0.8)

    assert gap(stale, spoil) > bound_of(torch.bfloat16, mixture=False, foreign=False)


def test_a_family_that_rounds_the_stream_itself_keeps_its_own(monkeypatch):
    for kind in ROUNDING[:1]:
        assert not load_model({"random": kind, "seed": 3, **FAMILIES[kind]}, dtype="bfloat16").fp32_stream
    tried = []
    real = load_check.check_attention

    def check(net, *args):
        tried.append(keeps_fp32_stream(net))
        if tried == [True]:
            raise load.ModelError("a dtype that its layers do not take")
        return real(net, *args)

    monkeypatch.setattr(load_check, "check_attention", check)
    assert not load_model({"random": "llama", **SIZE, "seed": 3}, dtype="bfloat16").fp32_stream and tried == [
        True,
        False,
    ]


@pytest.mark.parametrize("shape", [(96, 64), (64, 160)])
def test_blocks_of_rows_have_the_same_bits_in_every_batch(shape):
    weight, x = numbers(*shape), numbers(700, shape[1], seed=1)
    with equal_blocks(torch.bfloat16):
        whole = product(x, weight), fp32_product(x, weight)
        for n in (1, 2, 63, 65, 400):
            assert torch.equal(product(x[:n], weight), whole[0][:n])
            assert torch.equal(fp32_product(x[:n], weight), whole[1][:n])
