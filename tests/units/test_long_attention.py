"""Long packed samples: attention in blocks of queries is the attention in one call, and keeps memory linear in length."""

from __future__ import annotations

import copy

import pytest
import torch

from kits.families import model as family
from kits.train import apart, awkward_groups, batch, gradient, row, trainer
from rondel.models import packed_layout
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout, PackedSegment

RULES = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 3.0},
    "chunk": {"chunk": 16},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
}
# a prompt, three answers of about one size, one of another, and a branch of an answer
SEGMENTS = [(0, 40, None), (40, 30, 0), (70, 26, 0), (96, 30, 0), (126, 5, 0), (131, 12, 1)]


def attend(rule: ScoreRule, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Output, and the gradients of queries, keys and values."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, weight = (torch.randn(143, n, 8, generator=g) for n in (4, 2, 2, 4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = PackedLayout([PackedSegment(*s) for s in SEGMENTS]).attend(0, *inputs, rule)
    return out, *torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("long", [1, 300, 900])
def test_blocks_attend_as_one_call(monkeypatch, name, long):
    rule = ScoreRule(0.3, **RULES[name])
    whole = attend(rule)
    calls, block = [], packed_layout.AttentionCall._attend_blocks
    monkeypatch.setattr(packed_layout, "LONG", long)
    monkeypatch.setattr(packed_layout.AttentionCall, "_attend_blocks", lambda *a: calls.append(a[-1]) or block(*a))
    for a, b in zip(attend(rule), whole):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert calls, "blocks were taken"
    with torch.no_grad():
        q, k, v = (torch.randn(143, n, 8, generator=torch.Generator().manual_seed(1)) for n in (4, 2, 2))
        layout = PackedLayout([PackedSegment(*s) for s in SEGMENTS])
        blocked = layout.attend(0, q, k, v, rule)
        monkeypatch.setattr(packed_layout, "LONG", 1 << 22)
        assert torch.allclose(blocked, layout.attend(0, q, k, v, rule), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, recompute",
    [("llama", "none"), ("llama", "layers"), ("gemma2", "layers"), ("gpt_oss", "none"), ("deepseek_v32", "layers")],
)
def test_the_gradient_of_a_model_is_that_of_one_call(monkeypatch, kind, recompute):
    algo, grads = row("grpo"), []
    for long in (1 << 22, 64):
        monkeypatch.setattr(packed_layout, "LONG", long)
        t = trainer(copy.deepcopy(family(kind)), recompute=recompute)
        grads.append(gradient(t, batch(awkward_groups(), algo), algo, micro_tokens=60))
    assert apart(*grads) <= 1e-6


def kept_bytes(length: int) -> int:
    """What autograd keeps of one call over a prompt and an answer of `length` tokens each."""
    q, k, v = (torch.randn(2 * length, n, 8).requires_grad_() for n in (2, 1, 1))
    layout = PackedLayout([PackedSegment(0, length), PackedSegment(length, length, 0)])
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # alive, so that no address comes twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layout.attend(0, q, k, v, ScoreRule(0.3))
    assert not any(call._masks for call in layout.calls) or length < 2048
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
def test_what_is_kept_grows_with_the_length_and_not_with_its_square():
    assert kept_bytes(4096) < 2.2 * kept_bytes(2048)
    scores = 4 * 2 * 300 * (300 + 600)  # two heads, prompt and answer
    assert kept_bytes(300) < scores / 2, "longer than what has its scores written out"
