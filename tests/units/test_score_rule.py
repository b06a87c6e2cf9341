"""models/dense_attention.py: windows, chunks, sinks and slopes in packed attention, on every path that computes it."""

from __future__ import annotations

import pytest
import torch

from rondel.models import dense_attention
from rondel.models.aligned_numerics import AlignedPacked
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout, PackedSegment

# a stranger, a prompt, two answers to it: (first token, tokens before it in its sequence)
SEGMENTS = [PackedSegment(0, 13), PackedSegment(13, 9), PackedSegment(22, 7, 1), PackedSegment(29, 5, 1)]
PLACES = [list(range(13)), list(range(13, 22)), list(range(13, 29)), [*range(13, 22), *range(29, 34)]]


def written_out(q, k, v, rule: ScoreRule):
    """Query by query, as the formula says it."""
    out = torch.zeros_like(q)
    for places, segment in zip(PLACES, SEGMENTS):
        for i in range(len(places) - segment.length, len(places)):
            low = max(i - (rule.window or 99) + 1, i // rule.chunk * rule.chunk if rule.chunk else 0, 0)
            seen = torch.tensor(places[low : i + 1])
            for h in range(4):
                scores = k[seen, h // 2] @ q[places[i], h] * rule.scale
                if rule.slopes is not None:
                    scores = scores - rule.slopes[h] * (i - torch.arange(low, i + 1))
                if rule.sinks is not None:
                    scores = torch.cat([scores, rule.sinks[h : h + 1]])
                out[places[i], h] = scores.softmax(0)[: len(seen)] @ v[seen, h // 2]
    return out


@pytest.mark.parametrize("heads", [(), ("sinks",), ("slopes",), ("sinks", "slopes")])
@pytest.mark.parametrize("reach", [{}, {"window": 5}, {"chunk": 4}])
def test_every_path_computes_the_formula_and_its_gradient(heads, reach, monkeypatch):
    """Dense, fused with a sink for a key, and aligned."""
    g = torch.Generator().manual_seed(0)
    by_head = {name: torch.rand(4, generator=g) for name in heads}
    if "sinks" in by_head:
        by_head["sinks"].requires_grad_()
    q, k, v = (torch.randn(34, n, 16, generator=g, requires_grad=True) for n in (4, 2, 2))
    wanted, rule, up = [q, k, v], ScoreRule(0.3, **reach, **by_head), torch.randn(34, 4, 16, generator=g)
    wanted += [by_head["sinks"]] if "sinks" in by_head else []
    own = written_out(q, k, v, rule)
    exact = [own, *torch.autograd.grad((own * up).sum(), wanted)]
    layout = PackedLayout(SEGMENTS)
    for path, most in ((layout, 1 << 24), (layout, 0), (AlignedPacked(layout), 1 << 24)):
        monkeypatch.setattr(dense_attention, "DENSE", most)
        out = path.attend(0, q, k, v, rule)
        for ours, theirs in zip([out, *torch.autograd.grad((out * up).sum(), wanted)], exact, strict=True):
            assert float((ours - theirs).detach().abs().max()) <= 5e-6
