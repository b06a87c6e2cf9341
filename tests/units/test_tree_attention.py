"""models/tree_attention.py: Triton's interpreter computes what the layout of models/packed_layout.py does, values and
gradients, over trees of segments. On a GPU the same tests run on the card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kits.kernels import bfloat16_interpreter, moved_bytes
from rondel.models import packed_layout
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout, PackedSegment

pytest.importorskip("triton", reason="pip install triton")
from rondel.models import tree_attention as kernels
from rondel.models.tree_attention import SegmentTree, TreeTile, tree_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a prompt with answers, one of which branches; an answer of one token; a prompt without answers
TREE = [
    PackedSegment(0, 35),
    PackedSegment(35, 9, 0),
    PackedSegment(44, 18, 0),
    PackedSegment(62, 5, 1),
    PackedSegment(67, 1, 1),
    PackedSegment(68, 17),
]
# the same in two tiles
SMALL = [
    PackedSegment(0, 19),
    PackedSegment(19, 9, 0),
    PackedSegment(28, 5, 1),
    PackedSegment(33, 1, 1),
    PackedSegment(34, 7),
]
WHOLE = [PackedSegment(0, 21), PackedSegment(21, 9, 0, causal=False), PackedSegment(30, 7, 1, causal=False)]
RULES = {
    "plain": {},
    "window": {"window": 9},
    "chunk and softcap": {"chunk": 16, "softcap": 1.5},
    "window and sinks": {"window": 34, "sinks": True},
}


def drawn(tree: list[PackedSegment], heads: int, shared: int, size: int, wide: int, dtype: torch.dtype):
    torch.manual_seed(0)
    tokens = sum(s.length for s in tree)
    shapes = (heads, size), (shared, size), (shared, wide), (heads, wide)
    *given, up = (torch.randn(tokens, *shape, device=DEVICE).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in given], up


def rule_of(how: str, heads: int) -> ScoreRule:
    settings = dict(RULES[how])
    if settings.pop("sinks", False):
        settings["sinks"] = torch.linspace(-1, 1, heads, device=DEVICE, requires_grad=True)
    return ScoreRule(0.4, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, tree, shape",
    [
        pytest.param("plain", TREE, (4, 2, 16, 16), marks=pytest.mark.sweep),  # as WHOLE, and as those with a rule
        pytest.param("window", TREE, (2, 2, 20, 12), marks=pytest.mark.sweep),  # as with sinks
        ("chunk and softcap", SMALL, (2, 1, 24, 24)),
        ("window and sinks", TREE, (2, 1, 16, 16)),
        ("plain", WHOLE, (2, 1, 16, 16)),
    ],
)
def test_values_and_gradients_are_those_of_the_plain_layout(how, tree, shape, monkeypatch):
    monkeypatch.setattr(kernels, "tile_of", lambda *_, backward: TreeTile(16, 32 if backward else 16, 4, 1))
    given, up = drawn(tree, *shape, torch.float32)
    rule = rule_of(how, shape[0])
    leaves = given if rule.sinks is None else [*given, rule.sinks]
    monkeypatch.setattr(packed_layout, "LONG", 1 << 60)
    wanted = PackedLayout(tree, DEVICE).attend(0, *given, rule)
    ours = tree_attention(*given, SegmentTree.from_segments(tree, DEVICE), rule)
    torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(ours, leaves, up), torch.autograd.grad(wanted, leaves, up), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_sixteen_bits():
    given, up = drawn(SMALL, 2, 1, 16, 16, torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in given]
    wanted = PackedLayout(SMALL, DEVICE).attend(0, *wide, ScoreRule(0.4))  # float32: not by the kernel
    with bfloat16_interpreter():
        ours = tree_attention(*given, SegmentTree.from_segments(SMALL, DEVICE), ScoreRule(0.4))
        found = torch.autograd.grad(ours, given, up)
    for a, b in zip([ours, *found], [wanted, *torch.autograd.grad(wanted, wide, up.float())], strict=True):
        assert a.dtype == torch.bfloat16 and (a.float() - b).norm() <= 1e-2 * b.norm()


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_pack():
    given, _ = drawn(SMALL, 2, 1, 16, 16, torch.float32)
    whole = tree_attention(*given, SegmentTree.from_segments(SMALL, DEVICE), ScoreRule(0.4))
    alone = SMALL[:2]
    part = tree_attention(*(x[:28] for x in given), SegmentTree.from_segments(alone, DEVICE), ScoreRule(0.4))
    assert torch.equal(part, whole[:28])


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
def test_bytes_moved_are_those_of_the_formula(monkeypatch):
    forward, backward = TreeTile(16, 32, 4, 1), TreeTile(32, 16, 4, 1)
    monkeypatch.setattr(kernels, "tile_of", lambda *_, backward: (forward, TreeTile(32, 16, 4, 1))[backward])
    given, up = drawn(SMALL, 2, 1, 20, 12, torch.float32)
    wanted = kernels.bytes_moved(SMALL, 2, 20, 12, 4, (forward, backward))
    with moved_bytes() as moved:
        ours = tree_attention(*given, SegmentTree.from_segments(SMALL, DEVICE), ScoreRule(0.4))
    assert moved.total() == wanted.forward
    with moved_bytes() as moved:
        torch.autograd.grad(ours, given, up)
    assert moved.total() == wanted.dq + wanted.dkv


def test_which_code_computes_it_and_why():
    layout, part = PackedLayout(TREE, DEVICE), PackedLayout(TREE, DEVICE, own=[1, 2])
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(85, 2, 128))

    def why(layout=layout, q=on_gpu, **settings):
        return layout.choose_kernel(q, on_gpu, ScoreRule(0.4, **settings)).reason

    assert why() == "" and why(window=3, softcap=2.0, chunk=4, sinks=torch.ones(2)) == ""
    alone = PackedLayout([PackedSegment(0, 30), PackedSegment(30, 4)], DEVICE)
    assert why(alone).endswith("torch has a faster one") and why(alone, window=9) == "" == why(alone, softcap=2.0)
    assert why(part, slopes=torch.ones(2)).endswith("queries of some of the segments, slopes")
    assert why(images=torch.ones(1), chosen=torch.ones(1)).endswith(
        "keys that are chosen, images whose tokens see each other"
    )
    single = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(122, 2, 512))
    assert "more than 256 numbers, torch.float32 beside torch.bfloat16, float32" in why(q=single)
    assert why(q=SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, shape=(1, 1, 8))).startswith(
        "the tensors are on cpu"
    )
