"""Attention of packed training in loops for CPUs: values and gradients against float64, bits that depend on nothing but what
a token sees, and who takes them.
"""

from __future__ import annotations

import pytest
import torch

from kits.pairs import use_pairs
from rondel.models import packed_layout
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.processor import is_widened
from rondel.models.tree_loops import takes_tree

bf16, fp32 = torch.bfloat16, torch.float32
TREES = {
    "one token": [(1, None)],
    "a prompt and its answers": [(37, None), (5, 0), (64, 0), (1, 0), (11, None), (33, 4), (20, 4)],
    "answers of answers": [(3, None), (40, 0), (7, 1), (130, 2), (9, 1), (6, None)],
    "a long one": [(301, None), (29, 0)],
    "as many keys as lie in sets of a cache": [(483, None), (29, 0)],
}


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    use_pairs(monkeypatch)


def layout_of(lengths):
    starts = [sum(n for n, _ in lengths[:i]) for i in range(len(lengths))]
    return PackedLayout([PackedSegment(start, n, up) for start, (n, up) in zip(starts, lengths)])


def numbers(layout, heads, shared, size):
    generator = torch.Generator().manual_seed(layout.total)
    return [torch.randn(layout.total, n, size, generator=generator).to(bf16) for n in (heads, shared, shared, heads)]


def attend(layout, q, k, v, pull, rule, dtype=bf16):
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = layout.attend(0, *inputs, rule)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, pull.to(dtype)))]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("heads", "shared", "size"), [(3, 1, 64), (4, 4, 32), (10, 2, 96)])
@pytest.mark.parametrize("tree", TREES)
def test_values_and_gradients_are_near_to_float64(tree, heads, shared, size, window, monkeypatch):
    layout, rule = layout_of(TREES[tree]), ScoreRule(0.2, window=window)
    given = numbers(layout, heads, shared, size)
    ours, narrow = attend(layout, *given, rule), attend(layout, *given, rule, dtype=fp32)
    monkeypatch.setattr(packed_layout, "takes_tree", lambda *_: False)
    theirs, truth = attend(layout, *given, rule), attend(layout, *given, rule, dtype=torch.float64)
    for own, their, true in zip(ours, theirs, truth, strict=True):
        off, usual = (float((x - true).norm()) for x in (own, their))
        assert is_widened(bf16) or off <= 1.3 * usual + 1e-6, (off, usual)  # torch attends in float32 there
        assert off <= 6e-3 * float(true.norm()) + 1e-6
        torch.testing.assert_close(own, true, rtol=0.02, atol=0.02 * float(true.abs().max()))
    assert all(float((x - true).norm()) <= 1e-6 * float(true.norm()) + 1e-12 for x, true in zip(narrow, truth))


def test_bits_depend_on_what_a_token_sees_alone():
    layout, rule = layout_of(TREES["a prompt and its answers"]), ScoreRule(0.125, window=50)
    q, k, v, pull = numbers(layout, 6, 2, 64)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(attend(layout, q, k, v, pull, rule))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    with torch.no_grad():
        assert torch.equal(layout.attend(0, q, k, v, rule).double(), found[0][0])
        alone = torch.cat([torch.arange(37), torch.arange(42, 106)])
        own = layout_of([(37, None), (64, 0)]).attend(0, q[alone], k[alone], v[alone], rule)
        assert torch.equal(own.double(), found[0][0][alone]), "an answer without its siblings"


def test_who_takes_them(monkeypatch):
    layout = layout_of([(8, None), (3, 0)])
    q, k, v, _ = numbers(layout, 4, 2, 64)
    plain = ScoreRule(0.125)
    assert takes_tree(q, k, v, plain) and takes_tree(q.float(), k.float(), v.float(), plain)
    assert not takes_tree(q.half(), k.half(), v.half(), plain) and not takes_tree(q.float(), k, v, plain)
    assert not takes_tree(q[..., :24], k[..., :24], v[..., :24], plain)
    assert not takes_tree(q, k, v[..., :32], plain)
    for changed in ({"softcap": 30.0}, {"chunk": 4}, {"sinks": torch.zeros(4)}, {"images": torch.zeros(11)}):
        assert not takes_tree(q, k, v, ScoreRule(0.125, **changed))
    called = []
    whole = PackedLayout([PackedSegment(0, 8, causal=False), PackedSegment(8, 3, 0)])
    some = PackedLayout(layout.segments, own=[1])
    monkeypatch.setattr(packed_layout, "attend_tree", lambda *args: called.append(args))
    for other, rows in ((whole, slice(None)), (some, slice(8, None))):
        other.attend(0, q[rows], k, v, plain)
    assert not called, "segments that see themselves whole, and queries of some segments"
